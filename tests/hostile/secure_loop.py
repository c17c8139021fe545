"""Secure sums in one process, without Flower and without training: the server's conductor, and a member for each site, whose
numbers are known, so that what a lie does to their sum can be told exactly."""

import json
from collections import Counter

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.fixed_point import mean_from_fixed_point, parse_sum_message
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.wire import Envelope, PackedEnvelope, pack_tensors
from polyfed.deploy.secure_aggregation.client import SHARES_GROUP, SecureSumClient
from polyfed.deploy.secure_aggregation.protocol import SumId
from polyfed.deploy.server.secure_rounds import SecureRoundServer
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum, encode_reply_in_fixed_point

STEPS = ("advertise", "share", "mask", "hand out")
SITES = ("site-0", "site-1", "site-2", "site-3")
MODEL = "from polyfed.testing import SmallNet as model\n"


def write_keys(folder):
    """Registered keys of the sites, of the kind that signs fastest."""
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    for name in SITES:
        key = Ed25519PrivateKey.generate()
        (folder / f"{name}.key").write_bytes(key.private_bytes(*form))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{name}.key.pub").write_bytes(public)
    return folder


def packed(answer):
    """A letter as the server gets it."""
    if isinstance(answer, PackedEnvelope | str):
        return answer
    try:
        groups = {group: pack_tensors(tree) for group, tree in answer.body.tensors.items()}
        return PackedEnvelope(json.dumps(dict(answer.head)), dict(answer.body.scalars), groups)
    except UserError as error:  # as Flower's side tells
        return str(error)


def step_of(head):
    """Which step of a sum a letter asks for."""
    if head["kind"] == "task":
        return "mask"
    return next((name for name in ("hand out", "share", "advertise") if head.get(name.replace(" ", "_"))), "")


class Loop:
    """A run of four sites.

    Args:
        folder: an empty one.
        keys: of the sites.
        lie: `lie(loop, step, letter, answer)` is what site-0 answers in place of its answer.
        before: `before(loop, letter)` is called before site-0 answers.
        words: of the server's configuration.
    """

    def __init__(self, folder, keys, lie=None, before=None, **words):
        (folder / "server.py").write_text(MODEL)
        given = {
            "sites": ",".join(SITES), "out": str(folder / "run"), "rounds": 3, "secure": True, "max-update-norm": "off",
            "algorithm.name": "fedavg", "algorithm.lr": 0.1, "file": str(folder / "server.py"), **words,
        }  # fmt: skip
        self.server = build_or_restore_server(given)
        self.federation = self.server.build_checked_federation({name: {"task": "classification"} for name in SITES})
        self.members = {
            name: SecureSumClient(name, folder / name / self.server.run, keys / f"{name}.key", keys, 3)
            for name in SITES
        }
        for name in SITES:
            (folder / name).mkdir()
        self.folder_of_keys = keys
        self.lie, self.before, self.said, self.sent = lie, before, Counter(), []
        self.conductor = SecureRoundServer(self.server, self.federation, self._exchange)
        self.at = self.federation.initial_checkpoint()

    def reply(self, name, down):
        """What a site would send without masks: numbers by which it can be told."""
        k = SITES.index(name)
        tensors = {
            "model": {n: torch.full_like(t, k + 1.0) if t.is_floating_point() else t for n, t in down["model"].items()}
        }
        return Message(tensors, {"num_examples": 10 * (k + 1)})

    def answer(self, name, letter):
        """As a site answers."""
        head, member = letter.head, self.members[name]
        try:
            if head["kind"] == "sum":
                told, body = member.answer_sum_steps(head["run"], head)
                self.said.update(told["refusals"].values())
                return Envelope({"client": name, "run": head["run"], **told}, body)
            body, more = Message(), {}
            if head["part"]:
                place = member.decrypt_shares_and_join_sum(
                    SumId(head["run"], head["round"]), letter.body.tensors.get(SHARES_GROUP, {})
                )
                place.mark_used()
                reply = self.reply(name, letter.body.tensors)
                body = place.mask_encoded_reply(
                    encode_reply_in_fixed_point(reply, self.server.algorithm, place.max_sites)
                )
            if head.get("advertise"):
                more["advert"] = member.replace_keys_and_build_advertisement(SumId(head["run"], head["advertise"]))
            same = {n: head[n] for n in ("run", "round", "phase")}
            return Envelope({"client": name, **same, "failure": None, "seconds": 0.0, **more}, body)
        except (RefusalError, UserError) as refusal:
            self.said[str(refusal)] += 1
            return Envelope({"client": name, "refused": str(refusal)})

    def _exchange(self, letters, number):
        for name, letter in letters.items():
            if self.before is not None and name == SITES[0]:
                self.before(self, letter)
            answer = self.answer(name, letter)
            self.sent.append((name, letter, answer))
            if self.lie is not None and name == SITES[0]:
                answer = self.lie(self, step_of(letter.head), letter, answer)
            yield name, packed(answer)

    def round(self, number):
        """Plays a round: who is in its sum, the mean of the model's numbers there, and why others are not."""
        at = self.at
        who = self.federation.sample_round_clients(number)
        (tasks,) = self.federation.build_task_blocks("local", who, number, at)
        total, inside, failed = SecureSum(self.server.algorithm), [], {}
        for result in self.conductor.run_secure_round(tasks, at.state):
            if result.failure is not None:
                failed[result.task.client] = result.failure.reason
            elif result.reply is not None:
                inside.append(result.task.client)
                total.add(result.task.client, result.reply)
                layout = parse_sum_message(result.reply)[1]
        if not inside:
            return [], None, failed
        found, weight = mean_from_fixed_point(total._total, layout)
        numbers = torch.cat([t.flatten() for t in found["model"].values() if t.is_floating_point()])
        return sorted(inside), (weight, float(numbers.min()), float(numbers.max())), failed


def mean_of(sites):
    """The weight and the numbers of the mean over some sites, if none lies."""
    weights = {name: 10 * (SITES.index(name) + 1) for name in sites}
    total = sum(weights.values())
    mean = sum(weight * (SITES.index(name) + 1.0) for name, weight in weights.items()) / total
    return total, mean
