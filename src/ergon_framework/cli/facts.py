"""``ergon facts``: its commands with their options."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import facts_serve as serving
from ergon_framework.cli import facts_work as work
from ergon_framework.cli.facts_epoch import epoch
from ergon_framework.cli.facts_replicate import replicate
from ergon_framework.cli.job import moment
from ergon_framework.cli.options import Actor
from ergon_framework.cli.provider import lasting
from ergon_framework.cli.sizes import size
from ergon_framework.facts.model import ObjectName, Pair, Side
from ergon_framework.facts.policy import RetentionPolicy

facts = typer.Typer(
    help="Serves a boundary of facts, and appends, reads and looks after facts and artifacts.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Cert = Annotated[
    Path,
    typer.Option("--tls-cert", envvar="ERGON_FACTS_TLS_CERT", metavar="FILE", help="Your certificate, PEM."),
]
Key = Annotated[
    Path, typer.Option("--tls-key", envvar="ERGON_FACTS_TLS_KEY", metavar="FILE", help="Its key, PEM, no password.")
]
Authorities = Annotated[
    Path, typer.Option("--tls-ca", envvar="ERGON_FACTS_TLS_CA", metavar="FILE", help="The authorities you trust, PEM.")
]
Server = Annotated[
    str, typer.Option("--server", envvar="ERGON_FACTS_SERVER", metavar="HOST:PORT", help="Where the service is.")
]
ServerName = Annotated[
    str | None,
    typer.Option(envvar="ERGON_FACTS_SERVER_NAME", help="The name in its certificate, if that is not HOST."),
]
Timeout = Annotated[float, typer.Option(parser=lasting, metavar="TIME", help="How long one call may take: 10s, 2m.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Lines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
From = Annotated[str, typer.Option("--from", metavar="ZONE", help="The zone that facts come from.")]
To = Annotated[str, typer.Option("--to", metavar="ZONE", help="The zone that they are for.")]
Reader = Annotated[str, typer.Option(help="The name whose durable cursor is used; whoever reads is registered.")]
Bucket = Annotated[str, typer.Argument(metavar="BUCKET", help="The bucket of the artifact.")]
Name = Annotated[str, typer.Argument(metavar="KEY", help="Its key in there.")]
Owner = Annotated[
    str, typer.Option("--zone", metavar="ZONE", help="The zone that owns it. Default: the zone of the service.")
]
FromOffset = Annotated[
    int | None, typer.Option(min=1, metavar="OFFSET", help="Read again from this offset on; the cursor stays.")
]
Since = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Read again what was stored since; an ISO time, UTC by default."),
]
Confirm = Annotated[
    bool, typer.Option("--confirm", help="Move the cursor behind what was printed; without it the same comes again.")
]


@facts.command()
def serve(
    *,
    zone: Annotated[
        list[str], typer.Option(metavar="ZONE", help="A zone that this store belongs to; may be repeated.")
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes any free one.")],
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    store: Annotated[
        serving.StoreKind, typer.Option(help="Where facts are kept; memory forgets them when it ends.")
    ] = serving.StoreKind.POSTGRES,
    side: Annotated[Side, typer.Option(help="On which side of the boundary it is.")] = Side.INNER,
    contents: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where artifacts are kept, with --store postgres.")
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Serve also if what is confirmed may be lost with the power.")
    ] = False,
    max_facts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Facts that are retained at most; then it is full.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Bytes of facts and artifacts at most: 500MB, 2GiB.")
    ] = None,
    max_readers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Readers that each other zone may have here at most.")
    ] = 100,
    max_uploads: Annotated[
        int, typer.Option(min=1, metavar="N", help="Artifacts that a zone may upload at the same time.")
    ] = 16,
    keep_uploads: Annotated[
        float,
        typer.Option(parser=lasting, metavar="TIME", help="How long an upload that broke off can be gone on with."),
    ] = "1h",  # type: ignore[assignment]  # the parser is given it as it is written
    keep: Annotated[
        float | None,
        typer.Option(
            parser=lasting,
            metavar="TIME",
            help="Let go of what is older and confirmed by all readers: 30d. Default: no.",
        ),
    ] = None,
    prune_every: Annotated[float, typer.Option(parser=lasting, metavar="TIME", help="How often, with --keep.")] = "1h",  # type: ignore[assignment]  # the parser is given it as it is written
    revoked: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificates (PEM) and public-key=SHA256 that are not let in."),
    ] = None,
    crl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CRLs of the authorities in --tls-ca, as PEM or DER.")
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Connections at once, of all callers. Default: 4000.")
    ] = None,
    max_caller_connections: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Connections at once of one identity. Default: 400.")
    ] = None,
    max_address_connections: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Connections of one address without an identity. Default: 500."),
    ] = None,
    handshake_timeout: Annotated[
        float | None, typer.Option(parser=lasting, metavar="TIME", help="How long a handshake may take. Default: 5s.")
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Calls at once, of all callers. Default: 1000.")
    ] = None,
    max_caller_calls: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Calls at once of one identity. Default: 200.")
    ] = None,
    max_caller_streams: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Streams at once of one identity. Default: 100.")
    ] = None,
    max_caller_bytes: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Bytes of requests in flight of one identity. Default: 64MiB."),
    ] = None,
    compression: Annotated[bool, typer.Option("--compression", help="Accept compressed messages of callers.")] = False,
    grace: Annotated[
        float, typer.Option(parser=lasting, metavar="TIME", help="How long calls may go on after SIGTERM.")
    ] = "10s",  # type: ignore[assignment]  # the parser is given it as it is written
    probe_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Answer /live, /ready and /metrics on this port; 0 takes any free one."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
) -> None:
    """Serve a boundary over mutual TLS, until SIGTERM or Ctrl-C.

    Who may do what follows from the names in a caller's certificate: ergon://zone/NAME and ergon://operator/NAME.
    Certificates, keys and the list of revoked ones are read again when they change. The address of the database is
    ERGON_POSTGRES__DSN of the environment, or postgres.dsn of ergon.toml. The first line says where it listens.

    A store that has --max-facts or --max-bytes refuses what is beyond, and loses nothing; bytes of uploads that are not
    complete count, and a larger artifact is refused before its first byte is sent. With --keep it lets go of
    facts that are older, once every registered reader has confirmed them, and of artifacts that no fact names any more.

    Exit codes: 0 ended in order, 2 it could not begin: something is wrong, taken, or not durable.

    Example: ergon facts serve --zone "Plant A" --listen 0.0.0.0:7443 --contents /var/lib/ergon
    """
    limits: dict[str, int | float | bool | None] = {
        "connections": max_connections,
        "connections_per_identity": max_caller_connections,
        "connections_per_address": max_address_connections,
        "handshake": handshake_timeout,
        "calls": max_calls,
        "calls_per_identity": max_caller_calls,
        "streams_per_identity": max_caller_streams,
        "bytes_per_identity": max_caller_bytes,
        "compression": compression,
    }
    order = serving.Order(
        zones=tuple(zone),
        listen=listen,
        certificate=tls_cert,
        key=tls_key,
        authorities=tls_ca,
        store=store,
        side=side,
        contents=contents,
        accept_loss=accept_loss,
        revoked=revoked,
        crl=crl,
        grace=grace,
        config=config,
        max_facts=max_facts,
        max_bytes=max_bytes,
        max_readers=max_readers,
        max_uploads=max_uploads,
        keep_uploads=keep_uploads,
        retention=None if keep is None else RetentionPolicy(keep=keep, interval=prune_every),
        probe_port=probe_port,
        limits={name: value for name, value in limits.items() if value is not None},
    )
    raise typer.Exit(serving.served(order))


@facts.command()
def append(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="What the fact is about, such as order:17.")],
    predicate: Annotated[str, typer.Argument(metavar="PREDICATE", help="What is said of it, such as paid.")],
    object_json: Annotated[str, typer.Argument(metavar="OBJECT", help="The object, as JSON; - reads it from stdin.")],
    *,
    from_zone: From,
    to_zone: To,
    message_id: Annotated[
        str, typer.Option("--id", help="Made of what names the event; with the same id it is appended once.")
    ],
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # the parser is given it as it is written
    json: Json = False,
) -> None:
    """Append a fact, and print its offset. Appending it again is answered with the same offset.

    Exit codes: 0 confirmed, 1 refused, for instance because the id is taken by another payload, 2 out of reach or
    wrong, 3 nobody knows whether it was appended: run it again.

    Example: ergon facts append order:17 paid '{"total": 12.5}' --from "Plant A" --to HQ --id order-17-paid
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    stated = work.Stated(message_id, Pair(from_zone, to_zone), subject, predicate, object_json)
    raise typer.Exit(work.appended(where, stated, as_json=json))


@facts.command()
def get(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message_id.")],
    *,
    from_zone: From,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    json: Json = False,
) -> None:
    """Say what was confirmed for an id.

    Exit codes: 0 it is there, 1 it is not, or refused, 2 wrong, 3 out of reach.

    Example: ergon facts get order-17-paid --from "Plant A"
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.got(where, from_zone, message_id, as_json=json))


@facts.command()
def fetch(
    *,
    from_zone: From,
    to_zone: To,
    reader: Reader,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="The most that are read.")] = 100,
    from_offset: FromOffset = None,
    since: Since = None,
    confirm: Confirm = False,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    json: Lines = False,
) -> None:
    """Read facts behind the reader's cursor, or again from an offset or a time.

    Exit codes: 0 read, 1 refused, 2 wrong, 3 out of reach; what was printed has come, and was not confirmed.

    Example: ergon facts fetch --from "Plant A" --to HQ --reader ledger --confirm --json
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    wanted = work.Wanted(Pair(from_zone, to_zone), reader, from_offset, since, confirm=confirm)
    raise typer.Exit(work.fetched(where, wanted, limit=limit, as_json=json))


@facts.command()
def tail(
    *,
    from_zone: From,
    to_zone: To,
    reader: Reader,
    from_offset: FromOffset = None,
    since: Since = None,
    confirm: Confirm = False,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    json: Lines = False,
) -> None:
    """Print facts as they come, until Ctrl-C; a line that is down is waited for.

    While it catches up, stderr shows how far it is.

    Exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 refused, 2 wrong.

    Example: ergon facts tail --from "Plant A" --to HQ --reader watch
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    wanted = work.Wanted(Pair(from_zone, to_zone), reader, from_offset, since, confirm=confirm)
    raise typer.Exit(work.tailed(where, wanted, as_json=json))


@facts.command()
def put(
    bucket: Bucket,
    key: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What is stored.")],
    *,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    zone: Owner = "",
    json: Json = False,
) -> None:
    """Store a file as an artifact, for ever, and print its digest and size; run again, it goes on where it broke off.

    Exit codes: 0 stored, 1 refused: other bytes have that name, or it changed meanwhile, 2 wrong, 3 broken off: run it
    again.

    Example: ergon facts put invoices 2026/17.pdf invoice.pdf
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.put(where, ObjectName(zone, bucket, key), file, as_json=json))


@facts.command()
def cat(
    bucket: Bucket,
    key: Name,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there. Default: stdout.")
    ] = None,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    zone: Owner = "",
) -> None:
    """Print an artifact, or write it to a file, which is there only if all of it is right.

    Exit codes: 0 all of it came, and its digest is right, 1 it is not there, lost, or damaged, 2 wrong, 3 broken off.

    An artifact that a fact of another zone names belongs to that zone: give --zone.

    Example: ergon facts cat invoices 2026/17.pdf -o invoice.pdf
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.written(where, ObjectName(zone, bucket, key), output))


@facts.command()
def lag(
    *,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    json: Lines = False,
) -> None:
    """Show for each pair of zones what is retained, and what each reader has not confirmed yet.

    A zone sees its own pairs, an operator all.

    Exit codes: 0 shown, 1 refused, 2 wrong, 3 out of reach.

    Example: ergon facts lag
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.lagging(where, as_json=json))


@facts.command()
def retire(
    reader: Annotated[str, typer.Argument(metavar="READER", help="Who will never read again.")],
    *,
    from_zone: From,
    to_zone: To,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    actor: Actor = "",
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # as above
    json: Json = False,
) -> None:
    """Forget a reader, so that he holds up retention no more; what he has not read may then be removed.

    It takes an operator's certificate. The store keeps who did it, by the name in the certificate, and when.

    Exit codes: 0 retired, 1 there was none, you said no, or refused, 2 wrong, 3 out of reach.

    Example: ergon facts retire old-ledger --from "Plant A" --to HQ
    """
    where = work.Where(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.retired(where, reader, Pair(from_zone, to_zone), by=actor, sure=yes, as_json=json))


facts.command()(replicate)
facts.add_typer(epoch, name="epoch")
