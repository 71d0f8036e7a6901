"""From any target to the one that is declared: in order, again and again, and never at the cost of somebody's bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.target.model_spdk import METHODS, ModelVolumes
from tests.target.settings import AIO, HOST, KEYED, MALLOC, NQN, OTHER, wanted
from xkv_gateway.target import actual as read
from xkv_gateway.target.actual import ActualTarget
from xkv_gateway.target.desired import MODEL, DesiredTarget
from xkv_gateway.target.plan import Plan, plan
from xkv_gateway.target.teardown import plan_destroy

VOLUME = {"name": "xkv-card", "size": 32 << 20, "cluster_size": 1 << 20}
VARIANTS: dict[str, dict[str, Any]] = {
    "aio": {},
    "aio with a size": {"bdev": {**AIO, "size": 64 << 20}},
    "uring": {"bdev": {**AIO, "kind": "uring"}},
    "malloc": {"bdev": MALLOC},
    "512": {"bdev": {**MALLOC, "block_size": 512}},
    "nvme": {"bdev": {"kind": "nvme", "name": "xkv-ssd", "pci": "0000:5E:00.0"}},
    "existing": {"bdev": {"kind": "existing", "name": "theirs"}},
    "volume": {"lvol": VOLUME},
    "volume in memory": {"bdev": MALLOC, "lvol": VOLUME},
    "keys": {"hosts": [KEYED, {"nqn": OTHER, "dhchap_key_file": "credential"}]},
    "tls": {"tls": True, "hosts": [{"nqn": HOST, "psk_file": "/k/psk"}]},
    "any host": {"hosts": [], "allow_any_host": True},
    "listeners": {"listeners": ["127.0.5.1", "127.0.5.2:4421"]},
    "startup": {"startup": {"dhchap_digests": ["sha384"], "tls_buffer_size": 2 << 20}},
}


def state_of(model: ModelVolumes) -> ActualTarget:
    if not model.started:
        return ActualTarget(model.pid, started=False)
    saved = model.handle("framework_get_config", {"name": "nvmf"})
    return ActualTarget(
        pid=model.pid,
        transport=read.read_transport(model.handle("nvmf_get_transports", {})),
        startup=read.read_startup(saved),
        keys=read.read_keys(model.handle("keyring_get_keys", {})),
        bdevs=read.read_bdevs(model.handle("bdev_get_bdevs", {})),
        stores=read.read_stores(model.handle("bdev_lvol_get_lvstores", {})),
        subsystems=read.read_subsystems(model.handle("nvmf_get_subsystems", {}), saved),
    )


def new_model(*, started: bool = True) -> ModelVolumes:
    model = ModelVolumes(started=started)
    model.add_bdev("theirs", "Other disk", 64 << 20, 4096)
    return model


def carry_out(desired: DesiredTarget, model: ModelVolumes) -> list[str]:
    """Plan and do, as long as there is something to do; return the methods in order."""
    done: list[str] = []
    for _ in range(8):
        coming = plan(desired, state_of(model))
        assert not coming.refusals
        if coming.right:
            return done
        for step in coming.steps:
            model.handle(step.method, dict(step.params))
            done.append(step.method)
            if step.look:
                break
    pytest.fail(f"no end: {done}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_empty_target_becomes_the_declared_one_and_a_second_plan_is_empty(variant: str) -> None:
    desired, model = wanted(**VARIANTS[variant]), new_model()
    done = carry_out(desired, model)
    assert set(done) <= set(METHODS)
    first_listener = done.index("nvmf_subsystem_add_listener")
    assert set(done[first_listener:]) == {"nvmf_subsystem_add_listener"}, "listeners come last"
    assert plan(desired, state_of(model)).right
    subsystem = model.subsystems[NQN]
    assert (subsystem["model_number"], subsystem["serial_number"]) == (MODEL, desired.serial)
    assert subsystem["allow_any_host"] is desired.allow_any_host
    assert subsystem["namespaces"][1]["uuid"] == desired.uuid
    assert len(subsystem["listeners"]) == len(desired.listeners)


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_a_restart_the_same_target_is_made_again(variant: str) -> None:
    desired, model = wanted(**VARIANTS[variant]), new_model()
    carry_out(desired, model)
    before = model.subsystems[NQN]
    model = model.restarted()
    model.add_bdev("theirs", "Other disk", 64 << 20, 4096)
    done = carry_out(desired, model)
    assert model.subsystems[NQN] == before
    assert ("bdev_lvol_create_lvstore" in done) is (variant == "volume in memory"), (
        "what is in files is found again"
    )
    assert plan(desired, state_of(model)).right


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_made_is_taken_away_and_nothing_else(variant: str) -> None:
    desired, model = wanted(**VARIANTS[variant]), new_model()
    carry_out(desired, model)
    model.keys["theirs"] = "/k/theirs"
    for step in plan_destroy(desired, state_of(model), volumes=True).steps:
        model.handle(step.method, dict(step.params))
    assert (set(model.bdevs), model.keys, model.subsystems) == ({"theirs"}, {"theirs": "/k/theirs"}, {})
    assert plan_destroy(desired, state_of(model), volumes=True) == Plan()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plan_that_stopped_anywhere_is_gone_on_with(variant: str) -> None:
    desired = wanted(**VARIANTS[variant])
    whole = new_model()
    total = len(carry_out(desired, whole))
    for stop in range(total):
        model, done = new_model(), 0
        while done < stop:
            for step in plan(desired, state_of(model)).steps:
                model.handle(step.method, dict(step.params))
                done += 1
                if step.look or done == stop:
                    break
        subsystem = model.subsystems.get(NQN, {"listeners": []})
        assert len(subsystem["listeners"]) < len(desired.listeners), "nobody can reach a half of it"
        assert len(carry_out(desired, model)) == total - stop
        assert model.subsystems == whole.subsystems
        assert model.keys == whole.keys


def test_a_target_that_waits_is_told_its_settings_first() -> None:
    desired, model = wanted(**VARIANTS["startup"]), ModelVolumes(started=False)
    done = carry_out(desired, model)
    assert done[:3] == ["nvmf_set_config", "sock_impl_set_options", "framework_start_init"]
    assert model.startup["dhchap_digests"] == ["sha384"]
    remarks = plan(desired, state_of(new_model())).remarks
    assert any("--wait-for-rpc" in text for text in remarks)


# --- what is changed, and what is refused --------------------------------------------------------------------------


def steps_after(change: Any, variant: str = "keys") -> list[tuple[str, dict[str, Any]]]:
    """Return the steps after somebody has had a hand in the target."""
    desired, model = wanted(**VARIANTS[variant]), new_model()
    carry_out(desired, model)
    change(model)
    coming = plan(desired, state_of(model))
    assert not coming.refusals
    carry_out(desired, model)
    return [(step.method, dict(step.params)) for step in coming.steps]


def test_a_door_that_nobody_declared_is_shut() -> None:
    def change(model: ModelVolumes) -> None:
        subsystem = model.subsystems[NQN]
        subsystem["allow_any_host"] = True
        subsystem["hosts"]["nqn.x:stranger"] = {"nqn": "nqn.x:stranger"}
        where = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "4420"}
        subsystem["listeners"].append({"listen_address": where})

    methods = [method for method, _ in steps_after(change)]
    assert methods == [
        "nvmf_subsystem_remove_listener",
        "nvmf_subsystem_allow_any_host",
        "nvmf_subsystem_remove_host",
    ]


def test_a_host_without_its_keys_is_asked_for_them_again() -> None:
    def change(model: ModelVolumes) -> None:
        model.subsystems[NQN]["hosts"][HOST] = {"nqn": HOST}

    [(method, params)] = steps_after(change)
    assert method == "nvmf_subsystem_set_keys"
    assert set(params) == {"nqn", "host", "dhchap_key", "dhchap_ctrlr_key"}


def test_another_psk_and_a_listener_without_tls_are_made_anew() -> None:
    def change(model: ModelVolumes) -> None:
        model.subsystems[NQN]["hosts"][HOST]["psk"] = "another"
        model.subsystems[NQN]["listeners"][0]["secure_channel"] = False

    methods = [method for method, _ in steps_after(change, "tls")]
    assert methods == [
        "nvmf_subsystem_remove_listener",
        "nvmf_subsystem_remove_host",
        "nvmf_subsystem_add_host",
        "nvmf_subsystem_add_listener",
    ]


def test_another_file_is_another_key_and_the_old_one_is_forgotten() -> None:
    model = new_model()
    carry_out(wanted(hosts=[{"nqn": HOST, "dhchap_key_file": "/k/old"}]), model)
    done = carry_out(wanted(hosts=[{"nqn": HOST, "dhchap_key_file": "/k/new"}]), model)
    assert done == ["keyring_file_add_key", "nvmf_subsystem_set_keys", "keyring_file_remove_key"]
    assert list(model.keys.values()) == ["/k/new"]


def test_a_volume_and_a_file_grow_and_never_shrink() -> None:
    model = new_model()
    carry_out(wanted(lvol=VOLUME), model)
    larger = wanted(lvol={**VOLUME, "size": 48 << 20})
    assert carry_out(larger, model) == ["bdev_lvol_resize"]
    smaller = plan(wanted(lvol=VOLUME), state_of(model))
    assert smaller.right
    assert "would give up" in smaller.remarks[0]
    model = new_model()
    carry_out(wanted(), model)
    model.files["/srv/card.img"] = 128 << 20
    assert carry_out(wanted(bdev={**AIO, "size": 128 << 20}), model) == ["bdev_aio_rescan"]


def refusal(change: Any, **changes: Any) -> str:
    desired, model = wanted(**changes), new_model()
    change(model)
    coming = plan(desired, state_of(model))
    assert not coming.steps
    return " / ".join(coming.refusals)


def with_subsystem(**changes: Any) -> Any:
    def change(model: ModelVolumes) -> None:
        carry_out(wanted(), model)
        model.subsystems[NQN].update(changes)

    return change


def namespace(nsid: int, **changes: Any) -> Any:
    def change(model: ModelVolumes) -> None:
        carry_out(wanted(), model)
        spaces = model.subsystems[NQN]["namespaces"]
        spaces[nsid] = {**spaces.pop(1), "nsid": nsid, **changes}

    return change


def bdev(product: str = "AIO disk", size: int = 64 << 20, block: int = 4096, **more: Any) -> Any:
    specific = {"aio": {"filename": "/srv/card.img"}, "uuid": wanted().uuid, **more}
    return lambda model: model.add_bdev("xkv-bdev0", product, size, block, **specific)


def elsewhere(path: str) -> Any:
    return lambda model: model.add_bdev("theirs2", "AIO disk", 1 << 20, 512, aio={"filename": path})


def exported(model: ModelVolumes) -> None:
    bdev()(model)
    model.subsystems["nqn.x:y"] = {
        "nqn": "nqn.x:y",
        "hosts": {},
        "listeners": [],
        "namespaces": {1: {"nsid": 1, "bdev_name": "xkv-bdev0"}},
    }


def claimed(model: ModelVolumes) -> None:
    bdev()(model)
    model.bdevs["xkv-bdev0"]["claimed"] = True


def other_store(model: ModelVolumes) -> None:
    model.stores_on["/elsewhere"] = {"name": "xkv-store", "base": "theirs", "volumes": {}}
    bdev()(model)


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        (with_subsystem(model_number="SPDK bdev Controller"), {}, "somebody else's"),
        (with_subsystem(serial_number="S2"), {}, "serial number 'S2'"),
        (namespace(2), {}, "is namespace 2 already"),
        (namespace(1, bdev_name="theirs"), {}, "is the bdev theirs"),
        (namespace(1, uuid="11111111-2222-4333-8444-555555555555"), {}, "has the UUID"),
        (namespace(1, nguid="0" * 31 + "1"), {}, "has the NGUID"),
        (bdev("Malloc disk"), {}, "it is a 'Malloc disk'"),
        (bdev(block=512), {}, "blocks have 512 bytes"),
        (bdev(uuid="11111111-2222-4333-8444-555555555555"), {}, "its UUID is"),
        (bdev(aio={"filename": "/srv/other.img"}), {}, "it is the file /srv/other.img"),
        (bdev("Malloc disk", size=32 << 20), {"bdev": MALLOC}, "it has 32 MiB, not 64 MiB"),
        (elsewhere("/srv/card.img"), {}, "in use as the bdev theirs2"),
        (elsewhere("/srv//./card.img"), {}, "in use as the bdev theirs2"),
        (exported, {}, "is a namespace of nqn.x:y already"),
        (claimed, {"lvol": VOLUME}, "in use by something else"),
        (other_store, {"lvol": VOLUME}, "is on theirs, not on xkv-bdev0"),
        (lambda _: None, {"bdev": {"kind": "existing", "name": "gone"}}, "no bdev called gone"),
        (
            lambda _: None,
            {"bdev": {"kind": "existing", "name": "theirs", "size": 1 << 30}},
            "has 64 MiB, less than 1 GiB",
        ),
    ],
)
def test_what_is_somebody_elses_or_would_lose_bytes_is_refused_and_nothing_is_done(
    change: Any, changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(change, **changes)


def test_only_the_store_of_volumes_erases_and_says_so() -> None:
    model = new_model()
    desired = wanted(lvol=VOLUME)
    for step in plan(desired, state_of(model)).steps:
        model.handle(step.method, dict(step.params))
    [step] = plan(desired, state_of(model)).steps
    assert (step.method, step.erases) == ("bdev_lvol_create_lvstore", True)


def test_a_subsystem_of_somebody_else_is_not_taken_away_nor_a_bdev_that_others_use() -> None:
    model = new_model()
    with_subsystem(serial_number="S2")(model)
    assert plan_destroy(wanted(), state_of(model), volumes=True).refusals
    model = new_model()
    carry_out(wanted(), model)
    model.subsystems["nqn.x:y"] = {
        **model.subsystems[NQN],
        "nqn": "nqn.x:y",
    }
    coming = plan_destroy(wanted(), state_of(model), volumes=True)
    assert [step.method for step in coming.steps] == ["nvmf_delete_subsystem"]
    assert "it stays" in coming.remarks[0]


def test_volumes_stay_unless_asked_for() -> None:
    model = new_model()
    carry_out(wanted(lvol=VOLUME), model)
    coming = plan_destroy(wanted(lvol=VOLUME), state_of(model), volumes=False)
    assert [step.method for step in coming.steps] == ["nvmf_delete_subsystem"]
    assert not any(step.erases for step in coming.steps)


def test_another_transport_and_another_namespace_are_told_and_left() -> None:
    model = new_model()
    carry_out(wanted(), model)
    model.transports[0]["max_io_size"] = 131_072
    model.subsystems[NQN]["namespaces"][7] = {"nsid": 7, "bdev_name": "theirs"}
    coming = plan(wanted(), state_of(model))
    assert coming.right
    assert [text.split(":")[0].split(" (")[0] for text in coming.remarks] == [
        "target.transport.max_io_size",
        "namespace 7",
    ]
