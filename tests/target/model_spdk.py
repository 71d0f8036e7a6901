"""What is behind the scripted SPDK: a target that keeps in memory what it was told, and answers as the real one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.target.fake_spdk import RpcFault

if TYPE_CHECKING:
    from tests.target.fake_spdk import Params

METHODS: Final[dict[str, dict[str, list[str]]]] = json.loads(
    (Path(__file__).parent / "spdk_methods.json").read_text()
)
"""Every method that the gateway calls, with its parameters, as SPDK 26.09 documents them."""
INVALID: Final = -32602
CLUSTER: Final = 1 << 20


class ModelSpdk:
    """One process. `handle` answers; `fail_next` refuses the next calls of a method, with or without their effect."""

    def __init__(self, pid: int = 1000, *, started: bool = True, files: dict[str, int] | None = None) -> None:
        self.pid = pid
        self.started = started
        self.files = {"/srv/card.img": 64 << 20} if files is None else files
        """Path -> bytes; they outlive the process."""
        self.stores_on: dict[str, dict[str, Any]] = {}
        """Path -> the store that is on the file, and its volumes."""
        self.transports: list[Params] = []
        self.keys: dict[str, str] = {}
        self.bdevs: dict[str, Params] = {}
        self.subsystems: dict[str, Params] = {}
        self.startup: Params = {}
        self.fail_next: dict[str, list[bool]] = {}
        """Method -> for each of the next calls, which are refused, whether it is done all the same."""

    def handle(self, method: str, params: Params) -> Any:
        known = METHODS.get(method)
        if known is None:
            raise RpcFault(-32601, "Method not found")
        names = set(params)
        if not set(known["required"]) <= names <= {*known["required"], *known["optional"]}:
            raise RpcFault(INVALID, "Invalid parameters")
        if self.fail_next.get(method):
            if self.fail_next[method].pop():
                getattr(self, f"_{method}")(**params)
            raise RpcFault(-32603, "Internal error")
        return getattr(self, f"_{method}")(**params)

    # --- the process --------------------------------------------------------------------------------------------

    def _rpc_get_methods(self, current: bool = False) -> list[str]:
        startup = {"framework_start_init", "nvmf_set_config", "sock_impl_set_options"}
        return [name for name in METHODS if (name in startup) is not self.started or name.startswith("spdk_")]

    def _framework_get_reactors(self) -> Params:
        return {"tick_rate": 1_000_000, "pid": self.pid, "reactors": []}

    def _spdk_get_version(self) -> Params:
        return {"version": "SPDK v26.09-pre"}

    def _framework_wait_init(self) -> bool:
        return True

    def _framework_start_init(self) -> bool:
        self.started = True
        return True

    def _nvmf_set_config(self, **params: Any) -> bool:
        self.startup.update(params)
        return True

    def _sock_impl_set_options(self, **params: Any) -> bool:
        self.startup[params["impl_name"]] = params
        return True

    # --- keys and transport -------------------------------------------------------------------------------------

    def _keyring_get_keys(self) -> list[Params]:
        return [{"name": name, "path": path, "removed": False} for name, path in self.keys.items()]

    def _keyring_file_add_key(self, name: str, path: str) -> bool:
        if name in self.keys:
            raise RpcFault(-17, "File exists")
        if "missing" in path:
            raise RpcFault(-2, "No such file or directory")
        self.keys[name] = path
        return True

    def _keyring_file_remove_key(self, name: str) -> bool:
        if self.keys.pop(name, None) is None:
            raise RpcFault(-2, "No such file or directory")
        return True

    def _nvmf_get_transports(self) -> list[Params]:
        return self.transports

    def _nvmf_create_transport(self, **params: Any) -> bool:
        if self.transports:
            raise RpcFault(-32603, "Transport type 'TCP' already exists")
        self.transports.append(params)
        return True

    # --- bdevs --------------------------------------------------------------------------------------------------

    def _bdev_get_bdevs(self, name: str | None = None) -> list[Params]:
        return [bdev for bdev in self.bdevs.values() if name is None or bdev["name"] == name]

    def _bdev(self, name: str) -> Params:
        for bdev in self.bdevs.values():
            if name in {bdev["name"], *bdev["aliases"]}:
                return bdev
        raise RpcFault(-19, "No such device")

    def add_bdev(self, name: str, product: str, size: int, block: int, **more: Any) -> str:
        if name in self.bdevs:
            raise RpcFault(-17, "File exists")
        self.bdevs[name] = {
            "name": name,
            "aliases": more.pop("aliases", []),
            "product_name": product,
            "block_size": block,
            "num_blocks": size // block,
            "uuid": more.pop("uuid", None) or "00000000-0000-4000-8000-000000000000",
            "claimed": False,
            "driver_specific": more,
        }
        return name

    def _bdev_malloc_create(
        self, name: str, num_blocks: int, block_size: int, uuid: str | None = None
    ) -> str:
        return self.add_bdev(name, "Malloc disk", num_blocks * block_size, block_size, uuid=uuid)

    def _file_bdev(
        self, kind: str, product: str, name: str, filename: str, block: int, uuid: str | None
    ) -> str:
        if filename not in self.files:
            raise RpcFault(-2, "No such file or directory")
        self.add_bdev(name, product, self.files[filename], block, uuid=uuid, **{kind: {"filename": filename}})
        if filename in self.stores_on:
            self._show_store(name, self.stores_on[filename])
        return name

    def _show_store(self, base: str, store: dict[str, Any]) -> None:
        store["base"] = base
        self.bdevs[base]["claimed"] = True
        for name, size in store["volumes"].items():
            self.add_bdev(
                f"uuid-of-{name}", "Logical Volume", size, 4096, aliases=[f"{store['name']}/{name}"]
            )

    def _bdev_aio_create(
        self, name: str, filename: str, block_size: int, uuid: str | None = None, fallocate: bool = False
    ) -> str:
        return self._file_bdev("aio", "AIO disk", name, filename, block_size, uuid)

    def _bdev_uring_create(self, name: str, filename: str, block_size: int, uuid: str | None = None) -> str:
        return self._file_bdev("uring", "URING bdev", name, filename, block_size, uuid)

    def _bdev_aio_rescan(self, name: str) -> bool:
        bdev = self._bdev(name)
        bdev["num_blocks"] = self.files[bdev["driver_specific"]["aio"]["filename"]] // bdev["block_size"]
        return True

    def _bdev_nvme_attach_controller(self, name: str, trtype: str, traddr: str) -> list[str]:
        more = {"nvme": [{"pci_address": traddr, "trid": {"trtype": trtype, "traddr": traddr}}]}
        return [self.add_bdev(f"{name}n1", "NVMe disk", 1 << 30, 512, **more)]

    def _bdev_nvme_detach_controller(self, name: str) -> bool:
        return self._delete(f"{name}n1")

    def _delete(self, name: str) -> bool:
        bdev = self._bdev(name)
        del self.bdevs[bdev["name"]]
        return True

    _bdev_aio_delete = _bdev_uring_delete = _bdev_malloc_delete = _delete

    def _bdev_wait_for_examine(self) -> bool:
        return True

    def _bdev_get_iostat(self, names: list[str]) -> Params:
        zero = {"bytes_read": 0, "bytes_written": 0, "num_read_ops": 0, "num_write_ops": 0}
        ticks = {"read_latency_ticks": 0, "write_latency_ticks": 0}
        return {
            "tick_rate": 1000,
            "ticks": 1,
            "bdevs": [{"name": self._bdev(name)["name"], **zero, **ticks} for name in names],
        }


class ModelVolumes(ModelSpdk):
    """With logical volumes, and the subsystems."""

    def restarted(self, *, started: bool = True) -> ModelVolumes:
        after = ModelVolumes(self.pid + 1, started=started, files=self.files)
        after.stores_on = {path: store for path, store in self.stores_on.items() if path.startswith("/")}
        return after

    def _store(self, name: str) -> dict[str, Any]:
        for store in self.stores_on.values():
            if store["name"] == name and store["base"] in self.bdevs:
                return store
        raise RpcFault(-19, "No such device")

    def _bdev_lvol_create_lvstore(self, bdev_name: str, lvs_name: str, cluster_sz: int) -> str:
        bdev = self._bdev(bdev_name)
        specific = bdev["driver_specific"]
        path = specific.get("aio", {}).get("filename", f"memory of {self.pid}")
        self.stores_on[path] = {"name": lvs_name, "base": bdev["name"], "volumes": {}}
        bdev["claimed"] = True
        return "a-uuid"

    def _bdev_lvol_get_lvstores(self) -> list[Params]:
        return [
            {"name": store["name"], "base_bdev": store["base"], "cluster_size": CLUSTER, "free_clusters": 9}
            for store in self.stores_on.values()
            if store["base"] in self.bdevs
        ]

    def _bdev_lvol_create(self, lvs_name: str, lvol_name: str, size_in_mib: int, thin_provision: bool) -> str:
        store = self._store(lvs_name)
        if lvol_name in store["volumes"]:
            raise RpcFault(-17, "File exists")
        store["volumes"][lvol_name] = size_in_mib << 20
        alias = f"{lvs_name}/{lvol_name}"
        return self.add_bdev(
            f"uuid-of-{lvol_name}", "Logical Volume", size_in_mib << 20, 4096, aliases=[alias]
        )

    def _bdev_lvol_resize(self, name: str, size_in_mib: int) -> bool:
        self._bdev(name)["num_blocks"] = (size_in_mib << 20) // 4096
        store, _, volume = name.partition("/")
        self._store(store)["volumes"][volume] = size_in_mib << 20
        return True

    def _bdev_lvol_delete(self, name: str) -> bool:
        store, _, volume = name.partition("/")
        del self._store(store)["volumes"][volume]
        return self._delete(name)

    def _bdev_lvol_delete_lvstore(self, lvs_name: str) -> bool:
        store = self._store(lvs_name)
        self.stores_on = {path: other for path, other in self.stores_on.items() if other is not store}
        return True

    # --- subsystems ---------------------------------------------------------------------------------------------

    def _nvmf_get_subsystems(self) -> list[Params]:
        shown: list[Params] = [
            {"nqn": "nqn.2014-08.org.nvmexpress.discovery", "subtype": "Discovery", "hosts": []}
        ]
        for subsystem in self.subsystems.values():
            hosts = [{k: v for k, v in host.items() if k != "psk"} for host in subsystem["hosts"].values()]
            addresses = [listener["listen_address"] for listener in subsystem["listeners"]]
            shown.append(
                {
                    **{k: v for k, v in subsystem.items() if k not in {"listeners", "hosts", "namespaces"}},
                    "subtype": "NVMe",
                    "hosts": hosts,
                    "listen_addresses": addresses,
                    "namespaces": list(subsystem["namespaces"].values()),
                }
            )
        return shown

    def _framework_get_config(self, name: str) -> list[Params]:
        calls: list[Params] = [
            {"method": "nvmf_set_config", "params": {"dhchap_digests": ["sha256"], **self.startup}}
        ]
        for nqn, subsystem in self.subsystems.items():
            for host in subsystem["hosts"].values():
                params = {"nqn": nqn, "host": host["nqn"], **{k: v for k, v in host.items() if k != "nqn"}}
                calls.append({"method": "nvmf_subsystem_add_host", "params": params})
            calls += [
                {"method": "nvmf_subsystem_add_listener", "params": {"nqn": nqn, **listener}}
                for listener in subsystem["listeners"]
            ]
        return calls

    def _nvmf_create_subsystem(self, nqn: str, **params: Any) -> bool:
        if nqn in self.subsystems:
            raise RpcFault(-32603, f"Unable to create subsystem {nqn}")
        self.subsystems[nqn] = {"nqn": nqn, "hosts": {}, "listeners": [], "namespaces": {}, **params}
        return True

    def _subsystem(self, nqn: str) -> Params:
        if nqn not in self.subsystems:
            raise RpcFault(INVALID, "Invalid parameters")
        return self.subsystems[nqn]

    def _nvmf_delete_subsystem(self, nqn: str) -> bool:
        del self.subsystems[self._subsystem(nqn)["nqn"]]
        return True

    def _nvmf_subsystem_allow_any_host(self, nqn: str, allow_any_host: bool) -> bool:
        self._subsystem(nqn)["allow_any_host"] = allow_any_host
        return True

    def _nvmf_subsystem_add_host(self, nqn: str, host: str, **keys: str) -> bool:
        hosts = self._subsystem(nqn)["hosts"]
        if host in hosts or not set(keys.values()) <= set(self.keys):
            raise RpcFault(INVALID, "Invalid parameters")
        hosts[host] = {"nqn": host, **keys}
        return True

    def _nvmf_subsystem_set_keys(self, nqn: str, host: str, **keys: str) -> bool:
        hosts = self._subsystem(nqn)["hosts"]
        psk = {"psk": hosts[host]["psk"]} if "psk" in hosts[host] else {}
        hosts[host] = {"nqn": host, **psk, **keys}
        return True

    def _nvmf_subsystem_remove_host(self, nqn: str, host: str) -> bool:
        del self._subsystem(nqn)["hosts"][host]
        return True

    def _nvmf_subsystem_add_ns(self, nqn: str, namespace: Params) -> int:
        spaces = self._subsystem(nqn)["namespaces"]
        nsid: int = namespace["nsid"]
        if nsid in spaces:
            raise RpcFault(INVALID, "Invalid parameters")
        spaces[nsid] = {**namespace, "bdev_name": self._bdev(namespace["bdev_name"])["name"]}
        return nsid

    def _nvmf_subsystem_add_listener(self, nqn: str, listen_address: Params, **params: Any) -> bool:
        listeners = self._subsystem(nqn)["listeners"]
        if any(listener["listen_address"] == listen_address for listener in listeners):
            raise RpcFault(INVALID, "Invalid parameters")
        listeners.append({"listen_address": listen_address, **params})
        return True

    def _nvmf_subsystem_remove_listener(self, nqn: str, listen_address: Params) -> bool:
        subsystem = self._subsystem(nqn)
        subsystem["listeners"] = [
            listener for listener in subsystem["listeners"] if listener["listen_address"] != listen_address
        ]
        return True

    def _nvmf_subsystem_get_controllers(self, nqn: str) -> list[Params]:
        return []

    _nvmf_subsystem_get_qpairs = _nvmf_subsystem_get_controllers
