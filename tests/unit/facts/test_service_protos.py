"""What protoc makes of the protocol is what is in the repository."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parents[3] / "src"
NAME = "ergon_framework/facts/service/boundary"


def test_the_generated_code_is_up_to_date(tmp_path):
    arguments = ["protoc", f"-I{SOURCE}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"{NAME}.proto"]
    assert protoc.main(arguments) == 0
    for kind in (".py", ".pyi"):
        generated = (tmp_path / f"{NAME}_pb2{kind}").read_text(encoding="utf-8")
        assert generated == (SOURCE / f"{NAME}_pb2{kind}").read_text(encoding="utf-8"), "run make protos"
