"""`[fabric]`: the storage network, and the keys with which this host shows who it is."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from xkv_gateway.config.fields import KeyFile, Networks, Section


class FabricConfig(Section):
    """The storage network, between this host and the targets."""

    networks: Networks = Field(
        default=(),
        description='The networks of the storage alone, such as ["10.20.0.0/24"]. Cards and targets are reached, and'
        " targets listen, inside them only; the control and the admin port never listen there, nor do they talk to"
        " anybody from there. Empty: targets on loopback only.",
    )
    dhchap_key_file: KeyFile | None = Field(
        default=None,
        description="File (mode 0600) of this host's key, DHHC-1:..., for targets that ask who we are (DH-HMAC-CHAP)."
        " A bare name is a systemd credential.",
        examples=["/etc/xkv-gateway/dhchap.key"],
    )
    dhchap_ctrl_key_file: KeyFile | None = Field(
        default=None,
        description="File of the target's key: it has to show who it is, too. Needs dhchap_key_file.",
        examples=["/etc/xkv-gateway/dhchap-target.key"],
    )

    @model_validator(mode="after")
    def _own_key_first(self) -> Self:
        if self.dhchap_ctrl_key_file is not None and self.dhchap_key_file is None:
            raise ValueError("fabric.dhchap_ctrl_key_file: needs fabric.dhchap_key_file as well")
        return self
