"""What people pass by mistake is taken where its meaning is plain, and else refused with what to give."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, FedProx
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.errors import ClientError
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.simulation.checks.networks.trial_forward import output_shape
from polyfed.testing import small_clients

ROWS = [{"age": 40.0 + k, "sex": "fm"[k % 2], "ill": int(k % 3 == 0), "hospital": "ab"[k % 2]} for k in range(40)]


def sites():
    return pf.data.split_table(ROWS, "ill", "hospital")


def test_metrics_and_seeds_may_be_given_one_by_one():
    for names in (iter(["auc", "brier"]), np.array(["auc", "brier"]), {"auc": 0, "brier": 0}):
        assert [metric.name for metric in resolve_metrics(names, "classification")] == ["auc", "brier"]
    result = pf.compare(
        small_clients(), (name for name in ["fedprox"]), rounds=1, seeds=(seed for seed in [3, 5]), tune="none",
        references=False, quiet=True, engine="inprocess", parallel=1,
    )  # fmt: skip
    assert result.results["seeds"] == [3, 5]


def test_a_metric_that_fails_says_what_it_gets():
    score = pytest.importorskip("sklearn.metrics").accuracy_score
    trained = []
    for call in (pf.federate, pf.compare):  # before the first round
        with pytest.raises(pf.UserError, match=r"'accuracy_score' failed on outputs of shape .*outputs\.argmax\(1\)"):
            call(small_clients(), "fedavg", rounds=1, metrics=[score], quiet=True, callbacks=[trained.append])
    with pytest.raises(pf.UserError, match=r"'word' failed on outputs of .*ValueError: could not convert string"):
        pf.federate(small_clients(), "fedavg", rounds=1, metrics=[pf.Metric("word", lambda outputs, targets: "good")])
    with pytest.raises(pf.UserError, match=r"called with the network's outputs and the targets, and scored\(outputs\)"):
        pf.federate(small_clients(), "fedavg", rounds=1, metrics=[scored])
    assert trained == []


def scored(outputs):
    return 1.0


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (
            pf.federate,
            {"metric": "auc"},
            r"^federate\(\) has no argument 'metric'; did you mean metrics\? All \d+: help\(",
        ),
        (pf.federate, {"lr": 0.1}, r"'lr'; it is a field of the method: polyfed\.algorithms\.FedAvg\(lr=\.\.\.\)$"),
        (pf.federate, {"epochs": 3}, r"'epochs'; it is a field of the method: .*FedAvg\(local_epochs="),
        (pf.federate, {"verbose": False}, r"'verbose'; did you mean progress\?"),
        (pf.compare, {"seed": 1}, r"^compare\(\) has no argument 'seed'; did you mean seeds"),
        (pf.compare, {"algorithm": "fml"}, r"did you mean algorithms\?"),
        (pf.compare, {"methods": "fml"}, r"did you mean algorithms\?"),
        (
            pf.resume,
            {"seed": 5},
            r"^resume\(\) has no argument 'seed'; a run keeps the settings with which it was started, but for more rounds=",
        ),
        (pf.load, {"device": "cpu"}, r"^load\(\) has no argument 'device'; choices: folder"),
        (pf.look, {"client": []}, r"did you mean clients\?"),
        (pf.audit, {"run": 3}, r"did you mean runs or on_run\?"),
        (pf.export_model, {"target": "x"}, r"^export_model\(\) has no argument 'target'"),
        (pf.Client, {"name": "north"}, r"^Client\(\) has no argument 'name'; did you mean id\?"),
        (pf.Client, {"validation": ()}, r"did you mean val\?"),
        (pf.Examples, {"labels": ()}, r"^Examples\(\) has no argument 'labels'; did you mean y\?"),
        (pf.Privacy, {"epsilon": 1.0}, r"^Privacy\(\) has no argument 'epsilon'; did you mean target_epsilon\?"),
    ],
)
def test_a_wrong_keyword_of_a_public_function_suggests_the_right_one(call, arguments, message):
    with pytest.raises(TypeError, match=message):
        call(**arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bolder(FedAvg):
    boldness: float = 1.0


@pytest.mark.parametrize(
    ("call", "method", "arguments", "hint"),
    [
        (pf.federate, "fml", {"epochs": 2}, "polyfed.algorithms.FML(local_epochs=...)"),
        (pf.federate, "fedprox", {"mu": 1.0}, "polyfed.algorithms.FedProx(mu=...)"),
        (pf.federate, Bolder(), {"boldness": 2.0}, " Bolder(boldness=...)"),
        (pf.federate, "fedprx", {"lr": 0.1}, "polyfed.algorithms.FedAvg(lr=...)"),
        (pf.compare, ["local", "fedprox"], {"mu": 1.0}, "polyfed.algorithms.FedProx(mu=...)"),
        (pf.compare, {"a": "fedprx", "b": FedProx()}, {"mu": 1.0}, "polyfed.algorithms.FedProx(mu=...)"),
        (pf.compare, None, {"lr": 0.1}, "polyfed.algorithms.FedAvg(lr=...)"),
        (
            pf.federate,
            "fml",
            {"folds": 5},
            "it is an argument of polyfed.compare: compare(clients, algorithms, folds=...)",
        ),
    ],
)
def test_a_keyword_of_a_method_or_of_a_comparison_is_shown_where_it_belongs(call, method, arguments, hint):
    second = "algorithm" if call is pf.federate else "algorithms"
    for values, named in (((small_clients(), method), {}), ((small_clients(),), {second: method})):
        with pytest.raises(TypeError, match=f"has no argument '{next(iter(arguments))}'.*{re.escape(hint)}$"):
            call(*values, **named, **arguments)


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        (FedProx, r"a class is none yet: give FedProx\(\) or 'fedprox'$"),
        (["fedavg", "fml"], r"several are compared by polyfed\.compare\(clients, algorithms, \.\.\.\)$"),
        (3, r"for example polyfed\.algorithms\.FedAvg\(\)$"),
    ],
)
def test_what_is_no_method_says_how_to_give_one(method, hint):
    with pytest.raises(pf.UserError, match=f"^algorithm must be a method or its name, got .*; {hint}"):
        pf.federate(small_clients(), method, rounds=1)


@pytest.mark.parametrize("methods", [FedProx, [FedProx], {"a": FedProx}])
def test_a_class_among_the_methods_of_a_comparison_is_shown_as_an_object(methods):
    with pytest.raises(pf.UserError, match=r"^algorithms must be .*FedProx'>; .*: give FedProx\(\) or 'fedprox'$"):
        pf.compare(small_clients(), methods, rounds=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgetful(FedAvg):
    def aggregate(self, server_state, replies, server):
        super().aggregate(server_state, replies, server)


def test_a_server_half_without_a_return_is_named():
    with pytest.raises(pf.UserError, match=r"^Forgetful: after round 1 the server's state is None; aggregate \(or"):
        pf.federate(small_clients(), Forgetful(), rounds=1)


@pytest.mark.parametrize(
    ("member", "returned", "message"),
    [
        ("dispatch", {}, "Wrong: dispatch must return a polyfed.Message, .*, got dict"),
        ("local_update", None, r"Wrong.local_update must return two things, .*, got NoneType"),
        ("local_update", (1, 2, 3), r"Wrong.local_update must return two things, .*, got a tuple of 3"),
        ("personal_model", {}, "Wrong.personal_model must return a torch.nn.Module, got dict"),
    ],
)
def test_what_a_part_of_a_method_must_return_is_said(member, returned, message):
    kind = dataclasses.dataclass(frozen=True)(type("Wrong", (Averaging,), {member: lambda *_: returned, "__doc__": ""}))
    with pytest.raises((pf.UserError, ClientError), match=message):
        pf.federate(small_clients(), kind(), rounds=1, engine="inprocess")


def test_too_many_arguments_by_position_say_which_have_names():
    with pytest.raises(
        TypeError, match=r"^resume\(\) takes out by position, and all others by name, as clients=\.\.\., "
    ):
        pf.resume("runs/a", small_clients())
    with pytest.raises(TypeError, match=r"takes from 5 to 9 positional arguments but 10"):  # Python's own
        pf.Client(*range(9))


def test_the_name_of_a_network_says_how_it_is_given_in_python():
    for call, sizes in (
        (lambda: sites().build_clients("mlp"), r"\(3,\), 2\)$"),
        (lambda: pf.Client("a", "mlp", 1, 2), "shape, "),
    ):
        with pytest.raises(pf.UserError, match=rf"got .*; .*write pf\.models\.ModelSpec\('mlp', {{}}, {sizes}"):
            call()


def test_by_position_self_is_no_argument():
    with pytest.raises(TypeError, match=r"^FedAvg\(\) takes its fields by name, as lr=\.\.\., got 0\.1 by position$"):
        FedAvg(0.1)
    with pytest.raises(TypeError, match=r"^Privacy\(\) takes its arguments by name, as target_epsilon=\.\.\., "):
        pf.Privacy(8.0)


def test_a_network_in_place_of_the_function_that_builds_it_is_named_in_a_saved_run(tmp_path):
    pf.federate(small_clients(2), "fedavg", rounds=1, out=tmp_path / "run", workers=0)
    with pytest.raises(pf.UserError, match=r"got the network Linear; write model=lambda: MyNet\(\) instead"):
        pf.load(tmp_path / "run").model("client-0", model=torch.nn.Linear(6, 3))


def test_predict_takes_the_examples_of_a_client_and_refuses_inputs_with_labels():
    clients = small_clients(2)
    run = pf.federate(clients, "fedavg", rounds=1, workers=0)
    outputs = run.predict("client-0", clients[0].test)
    assert torch.equal(outputs, run.predict("client-0", clients[0].test.x))
    with pytest.raises(pf.UserError, match=r"its parts have the shapes \(4,\), \(4, 6\): give one tensor$"):
        run.predict("client-0", (torch.zeros(4, 6), torch.zeros(4)))


def test_targets_and_sequences_that_are_no_tensor_yet_say_how_to_make_one():
    x, times, events = torch.zeros(4, 6), torch.ones(4), torch.ones(4)
    with pytest.raises(pf.UserError, match=r"tuple of 2 tensors: make one, torch.stack\(values, 1\) for columns"):
        pf.Client("a", torch.nn.Identity, (x, (times, events)), (x, (times, events)), task="survival")
    sequences = [torch.zeros(5, 3), torch.zeros(7, 3)]
    with pytest.raises(pf.UserError, match=r"sequences of several lengths are padded: torch.nn.utils.rnn.pad_sequence"):
        pf.Client("a", torch.nn.Identity, (sequences, [0, 1]), (sequences, [0, 1]))
    with pytest.raises(pf.UserError, match=r"a class; give an object of it: Regression\(\)"):
        pf.Client("a", torch.nn.Identity, (x, events), (x, events), task=pf.tasks.Regression)


def test_masks_with_an_axis_of_one_channel_are_told_apart_from_volumes():
    examples = torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 8, 8, dtype=torch.int64)
    clients = [
        pf.Client(name, partial(torch.nn.Conv2d, 1, 2, 1), examples, examples, task="segmentation") for name in "ab"
    ]
    with pytest.raises(pf.UserError, match=r"axis of one channel, .* leave it out, y.squeeze\(1\)"):
        pf.federate(clients, "fedavg", rounds=1)


def test_an_audit_takes_a_run_and_says_that_one_in_memory_has_no_directory():
    with pytest.raises(pf.UserError, match="was kept in memory; write it with run"):
        pf.audit(pf.federate(small_clients(2), "fedavg", rounds=1, workers=0))


def test_a_name_that_polyfed_has_elsewhere_is_found():
    for name, message in {
        "FedAvg": r"did you mean polyfed\.algorithms\.FedAvg\?", "split_table": r"polyfed\.data\.split_table\?",
        "fed_avg": r"did you mean polyfed\.algorithms\.FedAvg\?",
        "Federate": r"did you mean federate\?", "zzz": "'zzz'$", "_own": "'_own'$",
    }.items():  # fmt: skip
        with pytest.raises(AttributeError, match=message):
            getattr(pf, name)


def test_a_misspelt_method_is_found():
    for name in ("FedAvgg", "fedavg", "fed_avg"):
        with pytest.raises(
            AttributeError, match=rf"has no attribute '{name}'; did you mean polyfed\.algorithms\.FedAvg\?"
        ):
            getattr(pf.algorithms, name)
    for name in ("zzz", "_fedavg"):
        with pytest.raises(AttributeError, match=f"'{name}'$"):
            getattr(pf.algorithms, name)


def test_options_of_heart_include_those_of_the_split():
    with pytest.raises(pf.UserError, match="heart has no option 'val_frac'; did you mean val_fraction"):
        pf.data.heart(val_frac=0.1)


def test_callbacks_that_cannot_be_called_are_refused_before_training():
    class Misnamed(pf.Callback):
        def on_round_end(self, record):
            raise AssertionError

    class Short(pf.Callback):
        def on_round(self):
            raise AssertionError

    for callback, message in (
        (lambda: None, r"called with one argument, the record of a round, and <lambda>\(\) cannot"),
        (Misnamed(), r"Misnamed has a method 'on_round_end', and no such hook is ever called; did you mean on_round"),
        (Short(), r"the hook is called as on_round\(record\), and Short\.on_round\(\) cannot"),
    ):
        with pytest.raises(pf.UserError, match=message):
            pf.federate(small_clients(), "fedavg", rounds=1, callbacks=[callback])


def test_a_network_that_ends_in_a_softmax_is_warned_of():
    clients = small_clients()
    network = clients[0].model
    ending = [dataclasses.replace(client, model=lambda: nn.Sequential(network(), nn.Softmax(1))) for client in clients]
    with pytest.warns(
        UserWarning, match="its network returns probabilities .*leave the softmax at its end out"
    ) as warned:
        pf.federate(ending, "fedavg", rounds=1, quiet=True, engine="inprocess")
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}  # so that each of one's lines shows it
    images = pf.Examples(torch.randn(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64))
    with pytest.warns(UserWarning, match="its network returns probabilities"):
        output_shape(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Softmax(1)), images, "client 'north'")


def test_a_comparison_of_one_client_is_refused():
    for plan_only in (False, True):
        with pytest.raises(
            pf.UserError, match="'client-0' is the one client, and nobody can join it: give at least two"
        ):
            pf.compare(small_clients()[:1], "fedprox", rounds=1, plan_only=plan_only, quiet=True)


def test_a_run_of_one_client_is_warned_of_unless_it_trains_alone(recwarn):
    for method in ("fedavg", "local"):
        pf.federate(small_clients()[:1], method, rounds=1, quiet=True, engine="inprocess")
    assert ["there is one client" in str(warning.message) for warning in recwarn] == [True]


def test_a_score_that_is_defined_nowhere_is_not_called_missing():
    clients = [
        pf.Client(
            name,
            lambda: nn.Linear(2, 2),
            train=(torch.randn(8, 2), torch.tensor([0, 1] * 4)),
            test=(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)),
        )
        for name in "ab"
    ]
    run = pf.federate(clients, "fedavg", rounds=1, metrics=["auc"], quiet=True, engine="inprocess")
    assert repr(run) == (
        "Run(FedAvg, 2 clients, 1 round, auc not defined: the test examples of a, b are all of one class, out=None)"
    )
    with pytest.raises(pf.UserError, match="no client 3 in this run; choices: a, b"):
        run.model(3)


def test_a_folder_of_runs_says_which_it_has(tmp_path):
    pf.federate(small_clients(), "fedavg", rounds=1, quiet=True, engine="inprocess", out=tmp_path / "first")
    with pytest.raises(pf.UserError, match=rf"holds neither .*; it has {tmp_path / 'first'}$"):
        pf.load(tmp_path)


def test_the_name_of_the_target_in_place_of_its_labels():
    frame = pytest.importorskip("pandas").DataFrame({"a": [1.0, 2.0], "y": [0, 1]})
    with pytest.raises(pf.UserError, match=r"labels are one text, 'y'; .*\(frame\[inputs\], frame\[target\]\)"):
        pf.Client("north", lambda: nn.Linear(1, 2), (frame, "y"), (frame, "y"))


def test_one_row_is_predicted_as_a_mapping_or_a_series():
    tables = sites()
    clients = tables.build_clients(lambda: nn.Linear(tables.num_features, tables.num_outputs))
    run = pf.federate(clients, "fedavg", rounds=1, quiet=True, engine="inprocess")
    row = {"age": 41.0, "sex": "f"}
    expected = run.predict("a", [row])
    assert torch.equal(run.predict("a", row), expected)
    assert torch.equal(run.predict("a", pytest.importorskip("pandas").Series(row)), expected)


def test_columns_are_named_by_texts():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(ROWS)
    for target, site in ((frame["ill"], "hospital"), ("ill", frame["hospital"])):
        with pytest.raises(pf.UserError, match=r"target and site must be names of columns, .*got a Series"):
            pf.data.split_table(frame, target, site)
    with pytest.raises(pf.UserError, match="did you mean val_fraction"):
        pf.data.split_table(frame, "ill", "hospital", val_frac=0.1)


def test_a_table_in_place_of_clients_says_how_to_make_them():
    with pytest.raises(pf.UserError, match=r"got ClientTables; give its clients, \.build_clients\(network\)"):
        pf.federate(sites(), "fedavg", rounds=1)
    frame = pytest.importorskip("pandas").DataFrame(ROWS)
    with pytest.raises(pf.UserError, match=r"got DataFrame; divide it by its sites: pf\.data\.split_table\(rows"):
        pf.federate(frame, "fedavg", rounds=1)
    with pytest.raises(pf.UserError, match=r"pf\.data\.split_table\(rows, target, site\), got DataFrame"):
        pf.look(frame)


def test_an_estimator_in_place_of_a_network_says_what_to_give():
    estimator = pytest.importorskip("sklearn.linear_model").LogisticRegression
    for model, name in ((estimator(), "LogisticRegression"), (estimator, "the class LogisticRegression")):
        with pytest.raises(pf.UserError, match=f"got {name}; give a function that returns a new torch.nn.Module"):
            pf.Client("north", model, (torch.zeros(4, 2), [0, 1, 0, 1]), (torch.ones(4, 2), [0, 1, 0, 1]))


def test_whole_numbers_as_inputs_say_how_to_convert_arrays_too():
    data, others = [(np.arange(40).reshape(10, 4) + k, [0, 1] * 5) for k in (0, 1)]
    with pytest.raises(
        pf.UserError, match=r"x\.float\(\) of a tensor or x\.astype\('float32'\) of an array or a frame$"
    ):
        pf.federate([pf.Client("a", lambda: nn.Linear(4, 2), data, others)], "fedavg", rounds=1, quiet=True)
