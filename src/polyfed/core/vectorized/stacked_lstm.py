"""Computes the LSTM layers of many networks at once, since torch's LSTM accepts the weights of only one network."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class _StackedLSTMLayer(torch.autograd.Function):
    """Computes one LSTM layer of k networks at once, step after step, as in `torch.nn.LSTM`.

    c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c), where (i, f, g, o) = W·(x, h, 1).

    The derivative is written out, since recording two dozen small operations a step takes longer than computing them. There
    are as few calls as possible: a step has one product, of inputs, state and bias together, and as tanh z = 2σ(2z) − 1,
    one sigmoid does for all gates (torch's tanh takes five times as long). So −tanh = 1 − 2σ is one call, and what is kept
    are −tanh, −h and 2c. Weights have the factors that this needs: 2, ½ and −1, which round nothing.

    Shapes: x (k, length, rows, width), W (k, 4·hidden, width + hidden + 1); h (k, length, rows, hidden), the last c.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        clients, length, rows, width = x.shape
        hidden = weight.shape[1] // 4
        scaled = weight.clone()
        scaled[:, 2 * hidden : 3 * hidden] *= 2
        scaled[:, :, width:-1].neg_()
        transposed = scaled.transpose(1, 2).contiguous()
        # Each step multiplies [x, −h of the step before, 1]. The last row has the last −h.
        packed = x.new_empty(clients, length + 1, rows, width + hidden + 1)
        packed[:, :length, :, :width] = x
        packed[:, 0, :, width:-1] = 0
        packed[..., -1] = 1
        inputs, outputs = packed.unbind(1), packed[..., width:-1].unbind(1)
        gates, states, squashed = [], [], []
        unit, twice = x.new_ones(()), x.new_zeros(clients, rows, hidden)
        for t in range(length):
            step_gates = torch.bmm(inputs[t], transposed).sigmoid_()
            i, f, g, o = step_gates.chunk(4, 2)
            torch.sub(unit, g, alpha=2, out=g)
            twice = torch.mul(f, twice).addcmul_(i, g, value=-2)
            s = twice.sigmoid()
            torch.sub(unit, s, alpha=2, out=s)
            torch.mul(o, s, out=outputs[t + 1])
            gates.append(step_gates)
            states.append(twice)
            squashed.append(s)
        ctx.save_for_backward(packed, weight, *gates, *states, *squashed)
        return packed[:, 1:, :, width:-1].neg(), twice / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        packed, weight, *saved = ctx.saved_tensors
        length = packed.shape[1] - 1
        gates, states, squashed = (saved[k * length : (k + 1) * length] for k in range(3))
        hidden, width = weight.shape[1] // 4, packed.shape[3] - weight.shape[1] // 4 - 1
        # i has −tanh(g) as its factor, f has 2c, o has −tanh(c).
        factors = weight.new_tensor([-1, 0.5, 1, -1]).repeat_interleave(hidden)[:, None]
        of_x_gates, of_h_gates = (part.contiguous() for part in (weight * factors)[..., :-1].split([width, hidden], 2))
        of_gates = packed.new_empty(*packed[:, 1:, :, 0].shape, 4 * hidden)
        steps, output_grads = of_gates.unbind(1), grads[0].unbind(1)
        of_c, of_h = grads[1].clone(), output_grads[-1]
        activation_grads = torch.empty_like(gates[0])
        of_i, of_f, of_g, of_o = activation_grads.chunk(4, 2)
        for t in reversed(range(length)):
            i, f, g, o = gates[t].chunk(4, 2)
            gate_grads = steps[t]
            of_c += torch.ops.aten.tanh_backward(of_h * o, squashed[t])
            torch.mul(of_c, g, out=of_i)
            torch.mul(of_c, states[t - 1], out=of_f) if t else of_f.zero_()
            torch.mul(of_h, squashed[t], out=of_o)
            torch.ops.aten.sigmoid_backward.grad_input(activation_grads, gates[t], grad_input=gate_grads)
            # g is tanh of its gate, not σ.
            torch.ops.aten.tanh_backward.grad_input(
                torch.mul(of_c, i, out=of_g), g, grad_input=gate_grads.chunk(4, 2)[2]
            )
            if t:
                of_c *= f
                of_h = torch.baddbmm(output_grads[t - 1], gate_grads, of_h_gates)
        every = of_gates.flatten(1, 2)
        of_weight = torch.bmm(every.transpose(1, 2), packed[:, :-1].flatten(1, 2)).mul_(factors)
        of_weight[:, :, width:-1].neg_()
        if not ctx.needs_input_grad[0]:
            return None, of_weight
        return torch.bmm(every, of_x_gates).view(*of_gates.shape[:3], width), of_weight


def run_stacked_lstm(
    part: nn.LSTM, weights: Mapping[str, Tensor], x: Tensor, hx: None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes all clients' LSTMs on examples stacked along the batch; returns what torch's LSTM returns."""
    if hx is not None:
        raise NotImplementedError("an LSTM that is given its first state")
    clients = len(weights["weight_ih_l0"])
    if part.batch_first:  # (k·rows, length, width), else (length, k·rows, width)
        steps = x.view(clients, -1, *x.shape[1:]).transpose(1, 2)
    else:
        steps = x.view(len(x), clients, -1, x.shape[-1]).transpose(0, 1)
    last_h, last_c = [], []
    for layer in range(part.num_layers):
        w, u = weights[f"weight_ih_l{layer}"], weights[f"weight_hh_l{layer}"]
        bias = weights[f"bias_ih_l{layer}"] + weights[f"bias_hh_l{layer}"] if part.bias else w.new_zeros(w.shape[:2])
        steps, c = _StackedLSTMLayer.apply(steps, torch.cat([w, u, bias.unsqueeze(2)], 2))  # type: ignore[no-untyped-call]
        last_h.append(steps[:, -1].flatten(0, 1))
        last_c.append(c.flatten(0, 1))
    out = steps.transpose(1, 2).flatten(0, 1) if part.batch_first else steps.transpose(0, 1).flatten(1, 2)
    return out, (torch.stack(last_h), torch.stack(last_c))
