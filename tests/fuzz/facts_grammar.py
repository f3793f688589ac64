"""The fuzzer's grammar of the facts service: its messages, unusual values for their fields, and mutations of both.

An input is one byte for the method, and the message.
"""

from __future__ import annotations

import random

from google.protobuf.descriptor import FieldDescriptor as Field

from ergon_framework.facts.service import boundary_pb2 as wire

DIGEST = "sha256:" + "0" * 64
ENVELOPE = wire.Envelope(
    message_id="m-1", from_zone="Plant A", to_zone="HQ", produced_at_unix_ms=1, correlation_id="c", labels={"a": "b"}
)
FACT = wire.Fact(subject="order:7", predicate="paid", object_json='{"total": 12.5, "lines": [1, "a", null]}')
REFERENCE = f'{{"bucket":"b","key":"k","digest":"{DIGEST}","size":1}}'
FACTS = wire.Facts(
    message_ids=["m-1", "m-2"],
    from_zones=["Plant A"],
    to_zones=["HQ", "HQ"],
    produced_at_unix_ms=[1, 2],
    subjects=["order:7", "order:8"],
    predicates=["paid", "has_file"],
    objects_json=[FACT.object_json, REFERENCE],
    correlation_ids=["c", ""],
    labels={1: wire.Labels(values={"a": "b"})},
)
PAIR = wire.Pair(from_zone="Plant A", to_zone="HQ")
CURSOR = wire.Cursor(epoch="e", offset=1)
STORED = wire.Stored(digest=DIGEST, size=1)
CONFIRMATION = wire.Confirmation(message_id="m-1", offset=1, epoch="e", digest=DIGEST, buffer="ESB")
FAULT = wire.Fault(
    kind="FactConflict", message="no", category="BUSINESS", retry_after=1.5, code="x", attributes={"from_zone": "A"}
)

#: Indexed by the first byte of an input.
REQUESTS = {
    "AppendFact": wire.Appending(envelope=ENVELOPE, fact=FACT),
    "AppendFacts": wire.AppendFactsRequest(facts=FACTS),
    "GetFact": wire.GetFactRequest(from_zone="Plant A", message_id="m-1"),
    "FetchFacts": wire.FetchFactsRequest(reader="r", pair=PAIR, limit=10, after=CURSOR),
    "ConfirmReceipt": wire.ConfirmReceiptRequest(reader="r", pair=PAIR, cursor=CURSOR),
    "CursorOf": wire.CursorOfRequest(reader="r", pair=PAIR),
    "EndOf": wire.EndOfRequest(pair=PAIR),
    "CursorAt": wire.CursorAtRequest(pair=PAIR, unix_ms=1),
    "RetireReader": wire.RetireReaderRequest(reader="r", pair=PAIR, by="me"),
    "Survey": wire.SurveyRequest(),
    "Describe": wire.DescribeRequest(),
    "Received": wire.ReceivedRequest(bucket="b", key="a/k", expected=STORED),
    "PutObject": wire.PutObjectRequest(header=wire.PutObjectHeader(bucket="b", key="a/k", expected=STORED, begin=1)),
    "GetObject": wire.GetObjectRequest(bucket="b", key="a/k", begin=1),
}
ANSWERS = {
    "Describe": wire.Description(epoch="e", durable=True, side="inner"),
    "AppendFact": CONFIRMATION,
    "AppendFacts": wire.AppendFactsAnswer(
        offsets=[1, 0], digests=[DIGEST, ""], epoch="e", buffer="ESB", others={1: wire.Appended(fault=FAULT)}
    ),
    "GetFact": wire.GetFactAnswer(confirmation=CONFIRMATION),
    "FetchFacts": wire.FetchFactsAnswer(
        facts=FACTS, digests=[DIGEST] * 2, offsets=[1, 2], stored_at_unix_ms=[1, 1], epochs=["e"]
    ),
    "CursorOf": wire.CursorAnswer(cursor=CURSOR),
    "RetireReader": wire.RetireReaderAnswer(retired=True),
    "Survey": wire.SurveyAnswer(
        logs=[wire.LogState(pair=PAIR, buffer="ESB", epoch="e", readers={"r": wire.Behind(offset=1, since_unix_ms=1)})]
    ),
    "Received": wire.ReceivedAnswer(size=1),
    "PutObject": wire.PutObjectAnswer(stored=STORED),
    "GetObject": wire.GetObjectAnswer(header=wire.GetObjectHeader(stored=STORED)),
    "Fault": FAULT,
}

TEXTS = (
    *("", " ", "Plant A", "HQ", "r", "sender:r", "x" * 65, "x" * 300, "x" * 1100, "\0", "\n", "\u2028", "ü🙂", "a b"),
    *("..", "../a", "a/../b", "a//b", "/a", "a\\b", ".", "b", "a/k", DIGEST, DIGEST.upper(), "sha256:", "inner", "ESB"),
    *("{}", "[]", "null", "1e400", "NaN", '{"a":1,"a":2}', "[" * 70 + "]" * 70, '"\\ud800"', "9" * 400, REFERENCE, "{"),
    *(REFERENCE.replace('"size":1', '"size":-1'), REFERENCE.replace('"k"', '"../k"'), "m-1", "m-2", "BUSINESS", "zzz"),
)
NUMBERS = (0, 1, 2, -1, 10, 1000, 1001, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63))


def get_messages(direction):
    return REQUESTS if direction == "facts-requests" else ANSWERS


def make_seeds(direction):
    """Return each message with valid values, and empty."""
    examples = get_messages(direction)
    encoded = [bytes([number]) + message.SerializeToString() for number, message in enumerate(examples.values())]
    return [*encoded, *(bytes([number]) for number in range(len(examples))), b""]


def mutate_message(data, direction, rng):
    """Return *data* with one field of its message changed; None if it is not a message."""
    examples = list(get_messages(direction).values())
    if not data:
        return None
    message = type(examples[data[0] % len(examples)])()
    try:
        message.ParseFromString(data[1:])
    except Exception:
        message.CopyFrom(examples[data[0] % len(examples)])
    _change(message, rng)
    return data[:1] + message.SerializeToString()


def _change(message, rng):
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = _pick_value(field.message_type.fields_by_name["key"], rng)
        if field.message_type.fields_by_name["value"].message_type is None:
            getattr(message, field.name)[key] = rng.choice(TEXTS)
        else:
            _change(getattr(message, field.name)[key], rng)
    elif field.message_type is not None and field.is_repeated:
        items = getattr(message, field.name)
        _change(rng.choice(items) if items and rng.random() < 0.7 else items.add(), rng)
    elif field.is_repeated:
        _change_column(getattr(message, field.name), field, rng)
    elif field.message_type is not None:
        submessage = getattr(message, field.name)
        submessage.SetInParent()
        _change(submessage, rng)
    else:
        setattr(message, field.name, _pick_value(field, rng))


def _change_column(values, field, rng):
    """Mostly replace a value: columns of unequal lengths are rejected before anything else is checked."""
    if values and rng.random() < 0.8:
        values[rng.randrange(len(values))] = _pick_value(field, rng)
    elif values and rng.random() < 0.5:
        values.pop()
    else:
        values.append(_pick_value(field, rng))


def _pick_value(field, rng):
    if field.type == Field.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == Field.TYPE_BYTES:
        return rng.choice(TEXTS).encode()
    if field.type == Field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == Field.TYPE_DOUBLE:
        return rng.choice((0.0, -1.0, 1.5, float("nan"), float("inf"), 1e308))
    number = rng.choice(NUMBERS)
    is_int32 = field.type == Field.TYPE_INT32
    return max(-(2**31), min(2**31 - 1, number)) if is_int32 else number


def make_random(seed):
    return random.Random(seed)
