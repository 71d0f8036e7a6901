from __future__ import annotations

from pathlib import Path

import pytest

from xkv_gateway.cardurl import (
    CardUrl,
    KernelCardUrl,
    NodeCardUrl,
    SoftCardUrl,
    TcpCardUrl,
    parse_card_url,
)

NQN = "nqn.2014-08.com.example:card0"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (f"nvme+tcp://192.0.2.1/{NQN}", TcpCardUrl("192.0.2.1", 4420, NQN, 1)),
        (f"nvme+tcp://192.0.2.1:4421/{NQN}?nsid=7", TcpCardUrl("192.0.2.1", 4421, NQN, 7)),
        (f"nvme+tcp://[2001:db8::1]:4420/{NQN}?nsid=1", TcpCardUrl("2001:db8::1", 4420, NQN, 1)),
        (f"nvme+tcp://card.example/{NQN}?nsid=4294967294", TcpCardUrl("card.example", 4420, NQN, 0xFFFFFFFE)),
        (f"kernel+tcp://192.0.2.1/{NQN}", KernelCardUrl("192.0.2.1", 4420, NQN, 1)),
        (
            f"kernel+tcp://192.0.2.1:4421/{NQN}?uuid={'0a' * 16}&nsid=2&nguid={'0b' * 16}",
            KernelCardUrl("192.0.2.1", 4421, NQN, 2, b"\x0b" * 16, b"\x0a" * 16),
        ),
        ("/dev/disk/by-id/nvme-card", NodeCardUrl(Path("/dev/disk/by-id/nvme-card"))),
        ("soft:/tmp/card.img?size=16GiB", SoftCardUrl(Path("/tmp/card.img"), 16 << 30)),
        ("soft:/tmp/card.img", SoftCardUrl(Path("/tmp/card.img"), None)),
        ("soft:card.img?size=5GB", None),
        ("soft:relative/card.img?size=1TiB", SoftCardUrl(Path("relative/card.img"), 1 << 40)),
        ("soft:c.img?size=134217728", SoftCardUrl(Path("c.img"), 128 << 20)),
    ],
)
def test_a_card_url_names_its_parts(text: str, url: CardUrl | None) -> None:
    if url is None:  # 5GB is no multiple of the block size
        with pytest.raises(ValueError, match=r"size: must be .* multiple"):
            parse_card_url(text)
        return
    assert parse_card_url(text) == url
    assert parse_card_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "scheme"),
        ("card.img", "scheme"),
        ("http://127.0.0.1/", "scheme"),
        (f"NVME+TCP://127.0.0.1/{NQN}", "scheme"),
        ("kernel+tcp:///" + NQN, "address is missing"),
        (f"kernel+tcp://127.0.0.1/{NQN}?nguid=1", "nguid"),
        (f"kernel+tcp://127.0.0.1/{NQN}?uuid={'0' * 32}", "uuid"),
        (f"nvme+tcp://127.0.0.1/{NQN}?nguid={'1' * 32}", "'nguid'"),
        ("/dev/", "no device"),
        ("/etc/card", "scheme"),
        ("soft:", "path"),
        ("soft://tmp/card.img", "path"),
        ("soft:?size=1GiB", "path"),
        ("soft:a\0b", "NUL"),
        ("soft:card.img?size=", "size"),
        ("soft:card.img?size=big", "size"),
        ("soft:card.img?size=1MiB", "size"),
        ("soft:card.img?size=-1", "size"),
        ("soft:card.img?size=1GiB&size=2GiB", "twice"),
        ("soft:card.img?bytes=1GiB", "'bytes'"),
        ("soft:card.img?size", "size=VALUE"),
        (f"nvme+tcp:///{NQN}", "address is missing"),
        ("nvme+tcp://127.0.0.1", "NQN"),
        ("nvme+tcp://127.0.0.1/", "NQN"),
        ("nvme+tcp://127.0.0.1/card0", "NQN"),
        ("nvme+tcp://127.0.0.1/nqn.2014-08.com.example:" + "x" * 200, "NQN"),
        (f"nvme+tcp://127.0.0.1:0/{NQN}", "port"),
        (f"nvme+tcp://127.0.0.1:70000/{NQN}", "port"),
        (f"nvme+tcp://127.0.0.1:x/{NQN}", "port"),
        (f"nvme+tcp://[::1/{NQN}", "address"),
        (f"nvme+tcp://127.0.0.1/{NQN}?nsid=0", "nsid"),
        (f"nvme+tcp://127.0.0.1/{NQN}?nsid=4294967295", "nsid"),
        (f"nvme+tcp://127.0.0.1/{NQN}?nsid=one", "nsid"),
        (f"nvme+tcp://127.0.0.1/{NQN}?nsid=" + "9" * 5000, "nsid"),
        (f"nvme+tcp://127.0.0.1/{NQN}?ns=1", "'ns'"),
        (f"nvme+tcp://127.0.0.1/{NQN}#x", "#"),
    ],
)
def test_a_wrong_card_url_is_refused_and_the_part_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="card URL") as caught:
        parse_card_url(text)
    assert part in str(caught.value)


def test_a_password_in_a_card_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="password") as caught:
        parse_card_url(f"nvme+tcp://user:geheim@127.0.0.1/{NQN}")
    assert "geheim" not in str(caught.value)


def test_several_addresses_are_one_card() -> None:
    url = parse_card_url(
        "nvme+tcp://10.20.0.1,[fd00::2]:4421,card.example/nqn.2014-08.com.example:card?nsid=2"
    )
    assert isinstance(url, TcpCardUrl)
    assert url.addresses == ("10.20.0.1:4420", "[fd00::2]:4421", "card.example:4420")
    assert url.portals == (("fd00::2", 4421), ("card.example", 4420))
    assert parse_card_url(str(url)) == url


@pytest.mark.parametrize(
    ("authority", "text"),
    [
        ("10.0.0.1,", "address"),
        (",10.0.0.1", "address"),
        ("10.0.0.1,10.0.0.1:4420", "twice"),
        ("10.0.0.1,10.0.0.2:0", "port"),
        ("10.0.0.1,10.0.0.2:x", "port"),
        ("10.0.0.1,me:secret@10.0.0.2", "password"),
        ("10.0.0.1,[fd00::", "address"),
        (",".join(f"10.0.0.{n}" for n in range(1, 10)), "at most 8"),
    ],
)
def test_a_wrong_address_among_several_is_refused(authority: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        parse_card_url(f"nvme+tcp://{authority}/nqn.2014-08.com.example:card")
    assert "secret" not in str(caught.value) or "password" not in text
