"""Simulated time: rates, availability traces and files, by values computed by hand; bad input is refused with a sentence."""

import json

import pytest

from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.simulation.scheduling.timing.availability import AvailabilityTrace, read_availability
from polyfed.simulation.scheduling.timing.client_times import ClientTimes
from polyfed.simulation.scheduling.timing.rates import ClientRates, parse_rates
from polyfed.simulation.settings import Settings

IDS = ("east", "north", "west")


def test_an_update_takes_examples_over_speed_and_bytes_over_bandwidth():
    speeds, bandwidths = (
        parse_rates({"east": 5.0, "north": 10, "west": 20}, "speeds", 0, IDS),
        ClientRates("bandwidth", 0, parameters=(100.0,)),
    )
    times = ClientTimes(FedAvg(local_epochs=2), {"east": 30, "north": 30}, speeds, bandwidths)
    assert times.seconds_of_update("east") == 2 * 30 / 5
    assert times.seconds_of_update("north", 50) == 2 * 30 / 10 + 0.5
    assert times.finish_time("north", 100.0, 50) == 106.5
    assert times.is_available("east", 3.0)


def test_work_pauses_while_the_client_is_away():
    trace = AvailabilityTrace(((10.0, 20.0), (40.0, 45.0)), period=50.0)
    assert trace.finish_time(0.0, 4.0) == 14.0  # waits until 10
    assert trace.finish_time(15.0, 8.0) == 43.0  # 5 s until 20, 3 s from 40
    assert trace.finish_time(15.0, 5.0) == 20.0
    # 5 s until 20, 5 s until 45; then two whole periods of 15 s, and 2 s from 160
    assert trace.finish_time(15.0, 42.0) == 162.0
    assert trace.finish_time(47.0, 15.0) == 95.0  # the whole next period
    assert [trace.is_available(t) for t in (9.9, 10, 19.9, 20, 60, 96)] == [False, True, True, False, True, False]
    assert [trace.next_available(t) for t in (0, 12, 30, 46, 121)] == [10, 12, 40, 60, 140]


def test_distributions():
    drawn = [parse_rates("uniform:1-20", "speeds", seed, IDS).rate_of("east") for seed in range(200)]
    assert 1 <= min(drawn) < 3 < 18 < max(drawn) <= 20
    logarithms = sorted(parse_rates("lognormal:1.0:200", "speeds", seed, IDS).rate_of("east") for seed in range(401))
    assert 150 < logarithms[200] < 260  # the median is 200
    assert parse_rates("constant:5", "speeds", 0, IDS).rate_of("east") == 5
    assert parse_rates("lognormal:0.5", "speeds", 0, IDS) == parse_rates("lognormal:0.5:1", "speeds", 0, IDS)
    speeds, bandwidths = (parse_rates("uniform:1-20", name, 0, IDS).rate_of("east") for name in ("speeds", "bandwidth"))
    assert speeds != bandwidths


def test_csv_files(tmp_path):
    (tmp_path / "devices.csv").write_text("client,speed,bandwidth\neast,5,100\nnorth,10,200\nwest,2.5,50\n")
    path = str(tmp_path / "devices.csv")
    assert parse_rates(path, "speeds", 0, IDS).rate_of("west") == 2.5
    assert parse_rates(path, "bandwidth", 0, IDS).rate_of("north") == 200
    (tmp_path / "traces.csv").write_text("client,start,end\neast,0,10\neast,5,20\nnorth,30,40\nwest,0,40\n")
    traces = read_availability(str(tmp_path / "traces.csv"), IDS)
    assert traces["east"] == AvailabilityTrace(((0.0, 20.0),), 40.0)  # overlapping intervals are one
    assert traces["north"].next_available(41) == 70


def test_fedscale_files(tmp_path):
    """`client_behave_trace` and `client_device_capacity`, as JSON; devices have numbers, and are assigned to the clients."""
    trace = {"duration": 100, "inactive": [60, 90], "finish_time": 100, "active": [10, 80], "model": "CPH1801"}
    other = {**trace, "active": [0], "inactive": [100]}
    (tmp_path / "trace.json").write_text(json.dumps({"10": other, "9": trace}))
    traces = read_availability(str(tmp_path / "trace.json"), IDS)
    assert traces["east"] == traces["west"] == AvailabilityTrace(((10.0, 60.0), (80.0, 90.0)), 100.0)
    assert traces["north"].is_available(99)
    (tmp_path / "capacity.json").write_text(json.dumps({"1": {"computation": 100.0, "communication": 800.0}}))
    path = str(tmp_path / "capacity.json")
    assert parse_rates(path, "speeds", 0, IDS).rate_of("north") == pytest.approx(
        1000 / 300
    )  # three times the inference
    assert parse_rates(path, "bandwidth", 0, IDS).rate_of("north") == 800 * 1024 / 8


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (-1, "speeds must be a positive number, .*, got -1"),
        (0.0, "got 0.0"),
        (True, "got True"),
        ("fast", "speeds must be a positive number, 'constant:5', 'uniform:1-20', .*, got 'fast'"),
        ("uniform:20-1", "got 'uniform:20-1'"),
        ("lognormal:x", "got 'lognormal:x'"),
        ("lognormal:-1", "got 'lognormal:-1'"),
        ({"east": -3.0}, "speeds: the rate of client 'east' must be a positive number, 1e-09 to 1e.15, got -3.0"),
        ({}, "got {}"),
    ],
)
def test_bad_speeds(value, sentence):
    with pytest.raises(UserError, match=sentence):
        Settings(speeds=value)


def test_a_client_without_an_entry():
    with pytest.raises(UserError, match="speeds has nothing for client 'west'; give an entry for every client"):
        parse_rates({"east": 1.0, "north": 2.0}, "speeds", 0, IDS)
    with pytest.raises(UserError, match="availability has nothing for client 'north'"):
        read_availability({"east": [[0, 1]], "west": [[0, 1]]}, IDS)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            {"east": [[5, 5]]},
            r"availability of client 'east' must be a list of \[start, end\] in seconds from 0, got \[5, 5\]",
        ),
        ({"east": []}, r"at least one, got \[\]; leave a client that never takes part out"),
        ({"east": [[-1, 5]]}, r"got \[-1, 5\]"),
        ("always", "availability must be a CSV or JSON file, or .*, got 'always'"),
    ],
)
def test_bad_availability(value, sentence):
    with pytest.raises(UserError, match=sentence):
        Settings(availability=value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client,start\neast,0\n", "has no column 'end'; it needs client, start, end in its first line"),
        ("client,start,end\neast,0,\n", "line 2: client, start, end must all be given"),
        ("client,start,end\neast,9,3\n", "line 2: start must be before end, got 9 and 3"),
        ("client,start,end\neast,x,3\n", "line 2: start must be a number of at least 0, got 'x'"),
        ("client,start,end\n", "has no rows"),
    ],
)
def test_damaged_csv(tmp_path, text, sentence):
    (tmp_path / "traces.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_availability(str(tmp_path / "traces.csv"), IDS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "must map clients to entries, got list"),
        ("{", "is not JSON"),
        ('{"east": {"active": [1], "inactive": [], "finish_time": 9}}', "as many times in 'active' as in 'inactive'"),
        ('{"east": {"active": [1], "inactive": ["x"], "finish_time": 9}}', "numbers of seconds"),
        ('{"east": 3}', "'east' must have as many times"),
    ],
)
def test_damaged_fedscale_trace(tmp_path, text, sentence):
    (tmp_path / "traces.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_availability(str(tmp_path / "traces.json"), IDS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client,speed\neast,2\nnorth,1\neast,3\n", "line 4: client 'east' has a line before; leave one of them out"),
        (
            "client,speed\neast,1,5\n",
            "line 2 has more cells than the first line has columns; write numbers with a point",
        ),
        ("client,speed\neast,0\n", "the rate of client 'east' must be a positive number, 1e-09 to 1e.15, got 0"),
    ],
)
def test_damaged_speeds(tmp_path, text, sentence):
    (tmp_path / "devices.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        parse_rates(str(tmp_path / "devices.csv"), "speeds", 0, ["east"])


def test_a_file_that_begins_with_a_mark(tmp_path):
    """As Excel saves CSV files."""
    (tmp_path / "devices.csv").write_bytes(b"\xef\xbb\xbfclient,speed\r\neast,2\r\n")
    assert parse_rates(str(tmp_path / "devices.csv"), "speeds", 0, ["east"]).rate_of("east") == 2.0


@pytest.mark.parametrize(
    "value", [1e-307, 1e300, "constant:1e-10", "uniform:1e-20-1", "lognormal:11", "lognormal:1:1e-300"]
)
def test_speeds_that_make_no_finite_times_are_refused(value):
    with pytest.raises(UserError, match=r"rates are from 1e-09 to 1e.15, and σ of lognormal is at most 10"):
        Settings(speeds=value)


def test_periods_that_make_no_finite_times_are_refused():
    for interval in ([0, 1e300], [0, 1e-12]):
        with pytest.raises(
            UserError, match=r"a period is at most 1e.15 s, of which a client is available for at least a"
        ):
            read_availability({"east": [interval], "north": [[0, 1e9]]}, ["east", "north"])


def test_a_missing_file():
    with pytest.raises(UserError, match=r"availability: cannot read '/nowhere/traces.csv': No such file"):
        read_availability("/nowhere/traces.csv", IDS)
