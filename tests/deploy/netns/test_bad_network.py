"""Four sites and a server over links with 50 ms delay, 1 % loss and 10 Mbit/s. Whatever else disturbs a run, it ends with
the models of the simulation, bit for bit, if need be after `--resume`; and what ended it has been said."""

import re
import time

import pytest

from .federation import ROUNDS, Federation, wait

CUT_SECONDS = 60.0
LOST = re.compile("Flower reports error [35]|started anew, before it replied")  # 3: a reply that was cut off on its way


def join(federation):
    """Waits until all sites are online."""
    wait(lambda: len(federation.online) == 4, 180, "all sites are online")
    return federation


def held_in_round_2(federation, name, **words):
    """Starts a run, and waits until a site is in the middle of its training; the run."""
    run = join(federation).begin(**words)
    wait(lambda: federation.records, 600, "round 1 ends")
    federation.sites[name].hold()
    wait(lambda: federation.sites[name].held, 300, f"{name} trains")
    return run


def test_delay_loss_and_a_narrow_link_change_nothing(federation, whole):
    run = join(federation).begin()
    assert federation.finish(run) == []
    federation.check_models(whole)
    for site in federation.sites.values():
        for way in ("up", "down"):
            traffic = site.machine.traffic[way]
            assert traffic["bytes"] > 900_000 * ROUNDS
            assert 0 < traffic["lost"] < 0.03 * traffic["packets"]


@pytest.mark.parametrize(("who", "seconds"), [("north", 15.0), ("north", CUT_SECONDS), ("server", CUT_SECONDS)])
def test_no_connection_while_a_site_trains(federation, whole, who, seconds):
    """Of one site, or of the server, that is of all sites. Training ends meanwhile. What is short costs time only."""
    run = held_in_round_2(federation, "north")
    machine = federation.server.machine if who == "server" else federation.sites[who].machine
    machine.cut()
    time.sleep(seconds / 3)
    federation.sites["north"].release()
    time.sleep(seconds * 2 / 3)
    machine.fix()
    told = federation.finish(run)
    print("ended with:", told)
    assert all(LOST.search(each) or "is not connected" in each for each in told)
    assert not told or seconds == CUT_SECONDS
    federation.check_models(whole)
    assert machine.traffic["up"]["cut"] > 0


def test_no_connection_while_the_model_travels(federation, whole):
    run = join(federation).begin()
    wait(lambda: federation.records, 600, "round 1 ends")
    machine = federation.sites["east"].machine
    before = machine.traffic["down"]["bytes"]
    wait(lambda: machine.traffic["down"]["bytes"] > before + 300_000, 200, "the model is on its way")
    machine.cut()
    time.sleep(CUT_SECONDS)
    machine.fix()
    told = federation.finish(run)
    print("ended with:", told)
    assert all(LOST.search(each) or "is not connected" in each for each in told)
    federation.check_models(whole)


def test_a_round_may_go_on_without_a_site_that_is_cut_off(federation):
    """on-error = "skip": no resume is needed, and the site is back in a later round. The models are others then."""
    run = held_in_round_2(federation, "north", rounds=4, **{"on-error": "skip"})
    machine = federation.sites["north"].machine
    machine.cut()
    wait(lambda: len(federation.records) >= 2, 200, "round 2 ends")
    machine.fix()
    federation.sites["north"].release()
    assert federation.finish(run) == []
    failures = [[failure["client"] for failure in record["failures"]] for record in federation.records]
    print(failures, federation.records[1]["failures"])
    assert failures[0] == [] == failures[3]
    assert failures[1] == ["north"]
    assert LOST.search(federation.records[1]["failures"][0]["reason"])


def test_a_site_reboots(federation, whole):
    """Without power in the middle of its training; its private state is the one it had on its disk."""
    run = held_in_round_2(federation, "south")
    site = federation.sites["south"]
    site.lose_power()
    site.release()
    time.sleep(10)
    site.boot()
    told = federation.finish(run)
    print("ended with:", told)
    assert told
    assert all(LOST.search(each) or "is not connected" in each for each in told)
    federation.check_models(whole)


def test_the_server_reboots(federation, whole):
    """Without power while a site trains: SuperLink, ServerApp and `polyfed flower run` are gone at once."""
    held_in_round_2(federation, "west")
    federation.server.lose_power()
    time.sleep(10)
    federation.sites["west"].release()
    federation.server.boot()
    join(federation)
    assert len(federation.records) == 1
    assert federation.finish(federation.resume()) == []
    federation.check_models(whole)


@pytest.mark.parametrize(
    ("who", "ahead", "made"), [("north", 3600, 86400), ("north", -3600, 0), ("server", 3600, 86400)]
)
def test_a_clock_is_set_wrong_by_an_hour(net, tmp_path, clock, whole, who, ahead, made):
    """In the middle of a round. The SuperLink refuses the site, also when that starts again; with the right time the run
    goes on."""
    federation = Federation(net, tmp_path, clock, made=made)
    try:
        run = held_in_round_2(federation, "north")
        host, site = {"server": federation.server, **federation.sites}[who], federation.sites["north"]
        host.set_clock(ahead)
        site.release()
        if made:
            wait(lambda: site.words().count("(it has ended") > 2, 240, "it is refused when it starts again")
            way = "behind" if (ahead < 0) == (who == "north") else "ahead of"
            told = f"the SuperNode at {site.machine.address} is refused: its clock is 3600 s {way} this one"
            assert told in federation.server.words()
            assert "refused by the SuperLink, whose log tells why: this machine's clock is wrong" in site.words()
        else:  # the site refuses the server, whose certificate did not exist an hour ago
            wait(lambda: "certificate is not yet valid" in site.words(), 240, "it refuses the server")
        status = run.wait()
        host.set_clock(0)
        if not made:  # Flower's SuperNode neither ends nor tries again after that
            site.lose_power()
            site.boot()
        told = federation.finish(federation.resume() if status else run)
        print("ended with:", told)
        federation.check_models(whole)
    finally:
        print(federation.tell())
