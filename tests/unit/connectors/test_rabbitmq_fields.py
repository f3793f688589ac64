"""Header tables of RabbitMQ messages, and the place in pika where they are read."""

from __future__ import annotations

import inspect
import math
import struct
import tomllib
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame
from pika.connection import Connection

from ergon_framework.connectors.rabbitmq.fields import (
    FaithfulAsyncioConnection,
    FaithfulSelectConnection,
    Properties,
    Timestamp,
    decode_table,
    encode_table,
)

MILLISECONDS = Timestamp(1_763_000_000_000)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.integers(2**40, 2**64 - 1).map(Timestamp)
    | st.integers(0, 250_000_000_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
    | st.integers(-(2**31), 2**31 - 1).map(lambda number: Decimal(number) / 100)
)
NAMES = st.text("abc-é", min_size=1, max_size=10)
TABLES = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=8)
)


@pytest.mark.spec("DX-21")
@given(TABLES)
def test_a_table_is_equal_after_a_round_trip(table):
    chunks: list[bytes] = []
    encode_table(chunks, table)
    encoded = b"".join(chunks)
    assert decode_table(encoded, 0) == (table, len(encoded))


@pytest.mark.spec("DX-21")
@given(TABLES.filter(bool), st.none() | st.text(max_size=20), st.none() | st.text(max_size=20))
def test_properties_with_any_headers_are_equal_after_a_round_trip(table, content_type, message_id):
    written = Properties(headers=table, content_type=content_type, message_id=message_id, priority=3, timestamp=7)
    parsed = read_frame(frame.Header(1, 5, written).marshal() + b"rest")
    assert parsed.channel_number == 1
    assert parsed.body_size == 5
    assert {**vars(parsed.properties), "problem": ""} == {**vars(written), "problem": ""}


def test_a_single_float_is_read_exactly():
    encoded = struct.pack(">IB", 7, 1) + b"f" + struct.pack(">cf", b"f", 1.5)
    assert decode_table(encoded, 0) == ({"f": 1.5}, 11)


def read_frame(buffer, kind=FaithfulSelectConnection):
    """The first frame of *buffer*, read by a connection that is not connected."""
    connection = kind.__new__(kind)
    connection._frame_buffer = buffer
    size, parsed = connection._read_frame()
    assert buffer[size:] in (b"", b"rest")
    return parsed


@pytest.mark.spec("DX-21")
@pytest.mark.parametrize("kind", [FaithfulAsyncioConnection, FaithfulSelectConnection])
def test_a_frame_that_pika_cannot_decode_is_read_with_its_problem(kind):
    buffer = frame.Header(1, 0, Properties(headers={"sent": MILLISECONDS, "kind": "order"})).marshal()
    with pytest.raises(ValueError, match="year"):
        frame.decode_frame(buffer)
    parsed = read_frame(buffer, kind)
    assert parsed.properties.headers == {"sent": MILLISECONDS, "kind": "order"}
    assert parsed.properties.problem.startswith("ValueError: year")


def test_headers_of_an_unknown_type_are_omitted_with_the_problem():
    encoded = struct.pack(">HIB", pika.BasicProperties.FLAG_HEADERS, 3, 1) + b"a?"
    content = struct.pack(">HHQ", 60, 0, 0) + encoded
    parsed = read_frame(struct.pack(">BHL", 2, 1, len(content)) + content + b"\xce")
    assert parsed.properties.headers == {}
    assert "InvalidFieldType" in parsed.properties.problem


def test_other_frames_are_read_by_the_client():
    assert read_frame(frame.Heartbeat().marshal()).NAME == "Heartbeat"
    plain = read_frame(frame.Header(1, 0, pika.BasicProperties(headers={"a": "b"})).marshal())
    assert type(plain.properties) is pika.BasicProperties
    with pytest.raises(pika.exceptions.InvalidFrameError):
        read_frame(b"\x01\x00\x01\x00\x00\x00\x00?")


def test_pika_still_cannot_read_these_fields():
    """Where pika learns it, all of this can go."""
    table = struct.pack(">IB", 11, 1) + b"d" + struct.pack(">cd", b"d", 1.5)
    assert pika.data.decode_table(table, 0)[0] == {"d": 1}
    with pytest.raises(pika.exceptions.UnsupportedAMQPFieldException):
        pika.data.encode_value([], math.pi)


@pytest.mark.spec("DX-21")
def test_the_private_names_of_pika_exist_and_its_version_is_capped():
    assert list(inspect.signature(Connection._read_frame).parameters) == ["self"]
    assert "self._frame_buffer" in inspect.getsource(Connection._read_frame)
    assert "_impl_class" in inspect.signature(pika.BlockingConnection).parameters
    assert callable(pika.channel.Channel._send_method)
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "pika>=1.4,<1.5" in project["optional-dependencies"]["rabbitmq"]
    assert version("pika").startswith("1.4.")
