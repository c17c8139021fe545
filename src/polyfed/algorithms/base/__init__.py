"""Provides what a method is written with, in one place: bases, the training loop, messages, and tools for networks and
states (docs/add_a_method.md).

>>> from dataclasses import dataclass
>>> from polyfed.algorithms.base import Averaging, interpolate
>>> @dataclass(frozen=True, kw_only=True)
... class Halved(Averaging):
...     '''FedAvg whose server goes half of the way to the clients' mean.'''
...     def server_step(self, server_state, mean, client_ids):
...         before = server_state["model"]
...         return {"model": {name: interpolate(before[name], w, 0.5) for name, w in mean["model"].items()}}
>>> import polyfed as pf
>>> pf.federate(pf.testing.small_clients(), Halved(lr=0.1), rounds=2, workers=0).last.round
2
"""

from polyfed.algorithms.base.averaging import (
    Averaging,
    ClientState,
    EvaluatesGlobalModel,
    GlobalModelMethod,
    ServerState,
    build_reply_and_client_state,
    interpolate,
)
from polyfed.algorithms.base.heads.body_and_head import BodyAndHeadMethod
from polyfed.algorithms.base.heads.chosen_head import ChosenHeadMethod
from polyfed.algorithms.base.heads.shared_heads import AveragedHeadMethod, HeadFromServerMethod
from polyfed.algorithms.base.local_parts import LocalPartMethod
from polyfed.algorithms.base.personal_network import PersonalBesideGlobalMethod, PersonalNetworkMethod
from polyfed.algorithms.base.public_data import PublicDataMethod
from polyfed.algorithms.base.regularizers import ProximalTerm, clone_trained_parameters
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import call_network, first_leaf, logits_of
from polyfed.core.methods.capabilities import (
    AddsServerTensors,
    BringsNetwork,
    KeepsServerStateByClient,
    ResolvesAutoFields,
    TrainsAuxiliaryNetwork,
    ValidatesNetworks,
    WrapsNetwork,
)
from polyfed.core.methods.declared_words import NewDisclosure
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    extract_sent_tensors_and_client_state,
    load_client_model,
    load_model_for_eval,
    recompute_norm_statistics_if_needed,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import (
    CachedModule,
    build_module,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
    restore_all_but_weights_and_set_eval,
)
from polyfed.core.seeds import derive_seed, numpy_generator, torch_generator
from polyfed.core.state_dict import StateDict, StateDictSpec, clone_tensors, state_dict_spec, weighted_mean
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars
from polyfed.core.vectorized.deferred_calls import PerClientTerm

__all__ = [
    "AddsServerTensors",
    "Algorithm",
    "AveragedHeadMethod",
    "Averaging",
    "BodyAndHeadMethod",
    "BringsNetwork",
    "BufferPolicy",
    "CachedModule",
    "ChosenHeadMethod",
    "Client",
    "ClientInfo",
    "ClientState",
    "EvaluatesGlobalModel",
    "Examples",
    "ForwardPass",
    "GlobalModelMethod",
    "HeadFromServerMethod",
    "KeepsServerStateByClient",
    "LocalPartMethod",
    "LocalTraining",
    "Message",
    "MethodCard",
    "NewDisclosure",
    "PerClientTerm",
    "PersonalBesideGlobalMethod",
    "PersonalNetworkMethod",
    "ProximalTerm",
    "PublicDataMethod",
    "ResolvesAutoFields",
    "ServerContext",
    "ServerState",
    "ServerUpdateMethod",
    "StateDict",
    "StateDictSpec",
    "TrainsAuxiliaryNetwork",
    "UserError",
    "ValidatesNetworks",
    "WrapsNetwork",
    "build_module",
    "build_reply_and_client_state",
    "cached_module",
    "call_network",
    "clone_tensors",
    "clone_trained_parameters",
    "copy_trained_weights_and_buffers",
    "derive_seed",
    "extract_sent_tensors_and_client_state",
    "fill_module",
    "first_leaf",
    "fit",
    "initial_state",
    "interpolate",
    "load_client_model",
    "load_model_for_eval",
    "logits_of",
    "numpy_generator",
    "predict",
    "recompute_norm_statistics_if_needed",
    "reply_scalars",
    "restore_all_but_weights_and_set_eval",
    "state_dict_spec",
    "tensors_to_send",
    "torch_generator",
    "weighted_mean",
]
