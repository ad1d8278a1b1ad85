"""twinpool/pb is what proto/ generates, byte for byte."""

from __future__ import annotations

from pathlib import Path

from tests.architecture.generate_proto import GENERATED, PROTO, generate_proto


def test_the_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    generate_proto(tmp_path)

    fresh = {path.name: path.read_bytes() for path in (tmp_path / "twinpool" / "pb").iterdir()}
    committed = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2*")}
    assert sorted(committed) == sorted(fresh)
    stale = [name for name, code in fresh.items() if committed[name] != code]
    assert stale == [], "run `make proto`"


def test_the_proto_folder_cannot_shadow_a_python_package() -> None:
    """Ray brings a package named `proto`; a folder without __init__.py and .py files leaves it alone."""
    assert {path.suffix for path in PROTO.iterdir()} == {".proto"}
