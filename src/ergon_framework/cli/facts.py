"""Commands of ``ergon facts`` and their options; ``facts_commands`` and ``facts_run`` do the work.

A fact is a statement (subject, predicate, object) that one zone, a site, sends to another; the two zones form a pair. A
boundary is the service through which a zone appends and reads facts and artifacts (files). Facts of a pair have
offsets; a reader is a named consumer, and its cursor is the last offset that it has confirmed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import facts_commands as work
from ergon_framework.cli import facts_run as serving
from ergon_framework.cli.facts_epoch import FromZone, SideOption, ToZone, epoch
from ergon_framework.cli.facts_run import replicate
from ergon_framework.cli.options import (
    TIME_FORMS,
    Actor,
    Config,
    Json,
    JsonLines,
    ProbePort,
    Yes,
    duration_option,
    parse_size,
    parse_time,
    resolve_actor_name,
)
from ergon_framework.facts.model import BoundarySide, ObjectName, ZonePair
from ergon_framework.facts.policy import RetentionPolicy

facts = typer.Typer(
    help="""Serve a fact boundary, and append, read and maintain facts and artifacts.

A zone is a site with its own store. A fact is an immutable record that one zone sends to another; an artifact is a file
that a fact references. A boundary is the interface of a zone's store. A reader is a named consumer of the facts from
one zone to another, with a cursor up to which it has confirmed them.""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Cert = Annotated[
    Path,
    typer.Option("--tls-cert", envvar="ERGON_FACTS_TLS_CERT", metavar="FILE", help="Certificate, PEM."),
]
Key = Annotated[
    Path,
    typer.Option("--tls-key", envvar="ERGON_FACTS_TLS_KEY", metavar="FILE", help="Private key, PEM, without password."),
]
Authorities = Annotated[
    Path, typer.Option("--tls-ca", envvar="ERGON_FACTS_TLS_CA", metavar="FILE", help="Trusted authorities, PEM.")
]
Server = Annotated[
    str, typer.Option("--server", envvar="ERGON_FACTS_SERVER", metavar="HOST:PORT", help="Address of the service.")
]
ServerName = Annotated[
    str | None,
    typer.Option(
        envvar="ERGON_FACTS_SERVER_NAME",
        metavar="NAME",
        show_default="HOST",
        help="Name in the server certificate.",
    ),
]
Timeout = Annotated[float, duration_option("Timeout of one call.")]
Reader = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Reader; the first use registers it, and unconfirmed facts are then kept until it is retired.",
    ),
]
Bucket = Annotated[str, typer.Argument(metavar="BUCKET", help="Bucket of the artifact.")]
ArtifactKey = Annotated[str, typer.Argument(metavar="KEY", help="Key in the bucket.")]
OwnerZone = Annotated[
    str, typer.Option("--zone", metavar="ZONE", show_default="service's zone", help="Zone that owns the artifact.")
]
FromOffset = Annotated[
    int | None, typer.Option(min=1, metavar="OFFSET", help="Read again from this offset; the cursor does not move.")
]
Since = Annotated[
    datetime | None,
    typer.Option(
        parser=lambda text: datetime.fromtimestamp(parse_time(text), UTC),
        metavar="TIME",
        help=f"Read again what was stored at or after TIME: {TIME_FORMS}.",
    ),
]
Confirm = Annotated[
    bool,
    typer.Option("--confirm", help="Advance the cursor past the printed facts; not with --from-offset or --since."),
]


@facts.command()
def serve(
    *,
    zone: Annotated[
        list[str], typer.Option(metavar="ZONE", help="Zone that the store belongs to; repeatable, if zones share it.")
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Listen address; port 0 selects a free port.")],
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    store: Annotated[
        serving.StoreKind, typer.Option(help="Storage of the facts; memory loses them at exit.")
    ] = serving.StoreKind.POSTGRES,
    side: SideOption = BoundarySide.INNER,
    artifact_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for artifacts, with --store postgres.")
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Allow storage that may lose facts: memory, or a database that is not durable."
        ),
    ] = False,
    max_facts: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of retained facts.")] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Maximum size of facts and artifacts, for example 500MB or 2GiB."
        ),
    ] = None,
    max_readers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of readers per remote zone.")
    ] = 100,
    max_uploads: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of concurrent uploads per zone.")
    ] = 16,
    keep_uploads: Annotated[float, duration_option("Time for which an interrupted upload can be resumed.")] = "1h",  # type: ignore[assignment]  # typer parses the default too
    keep: Annotated[
        float | None,
        duration_option("Delete facts older than this that all readers have confirmed.", show_default="keep all"),
    ] = None,
    retention_interval: Annotated[float, duration_option("Interval between deletions, with --keep.")] = "1h",  # type: ignore[assignment]  # typer parses the default too
    revoked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with revoked certificates in PEM, and lines public-key=DIGEST with the SHA-256 of revoked keys.",
        ),
    ] = None,
    crl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CRLs of the authorities in --tls-ca, as PEM or DER.")
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="4000", help="Maximum number of concurrent connections."),
    ] = None,
    max_caller_connections: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="400", help="Maximum number of connections per caller."),
    ] = None,
    max_address_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="500",
            help="Maximum number of unauthenticated connections per IP address.",
        ),
    ] = None,
    handshake_timeout: Annotated[float | None, duration_option("Timeout of a handshake.", show_default="5s")] = None,
    max_calls: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default="1000", help="Maximum number of concurrent calls.")
    ] = None,
    max_caller_calls: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="200", help="Maximum number of concurrent calls per caller."),
    ] = None,
    max_caller_streams: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="100", help="Maximum number of concurrent streams per caller."),
    ] = None,
    max_caller_bytes: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="64MiB",
            help="Maximum size of the requests in flight per caller.",
        ),
    ] = None,
    compression: Annotated[bool, typer.Option("--compression", help="Accept compressed messages.")] = False,
    grace: Annotated[float, duration_option("Time for running calls after SIGTERM.")] = "10s",  # type: ignore[assignment]  # typer parses the default too
    probe_port: ProbePort = None,
    config: Config = None,
) -> None:
    """Serve a boundary over mutual TLS until SIGTERM or Ctrl-C.

    The URIs in a caller's certificate (subject alternative names) define its permissions: ergon://zone/NAME and
    ergon://operator/NAME.
    Certificates, keys and the revocation list are reloaded when they change. The database address is read from
    ERGON_POSTGRES__DSN or from postgres.dsn in ergon.toml. The first line of output is the listen address.

    A store with --max-facts or --max-bytes rejects data beyond the limit; stored data is kept. Incomplete uploads
    count towards the limit; an artifact that is too large is rejected before its first byte is sent. With --keep the
    store deletes facts older than --keep after every registered reader has confirmed them, and artifacts that no fact
    references.

    Exit codes: 0 stopped cleanly, 2 startup failed: invalid option or configuration, address in use, database
    unavailable, or store not durable.

    Example: ergon facts serve --zone "Plant A" --listen 0.0.0.0:7443 --artifact-dir /var/lib/ergon
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
    options = serving.ServeOptions(
        zones=tuple(zone),
        listen=listen,
        certificate=tls_cert,
        key=tls_key,
        authorities=tls_ca,
        store=store,
        side=side,
        contents=artifact_dir,
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
        retention=None if keep is None else RetentionPolicy(keep=keep, interval=retention_interval),
        probe_port=probe_port,
        limits={name: value for name, value in limits.items() if value is not None},
    )
    raise typer.Exit(serving.serve(options))


@facts.command()
def append(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Subject of the fact, for example order:17.")],
    predicate: Annotated[str, typer.Argument(metavar="PREDICATE", help="Predicate, for example paid.")],
    object_json: Annotated[str, typer.Argument(metavar="OBJECT", help="Object as JSON; - reads it from stdin.")],
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    message_id: Annotated[
        str,
        typer.Option(
            "--id",
            metavar="ID",
            help="Id of the fact; derive it from the event, so that a retry has the same id. Each id is stored once.",
        ),
    ],
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: Json = False,
) -> None:
    """Append a fact and print its offset; appending it again returns the same offset.

    Exit codes: 0 confirmed, 1 rejected, for example because a different fact has the id, 2 invalid option or
    configuration, 3 service unavailable, outcome unknown: run the command again.

    Example: ergon facts append order:17 paid '{"total": 12.5}' --from "Plant A" --to HQ --id order-17-paid
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    fact_options = work.FactOptions(message_id, ZonePair(from_zone, to_zone), subject, predicate, object_json)
    raise typer.Exit(work.append(service, fact_options, as_json=json))


@facts.command()
def get(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the fact.")],
    *,
    from_zone: FromZone,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: Json = False,
) -> None:
    """Show the confirmation of a stored fact: offset, epoch and digest, without its content.

    Exit codes: 0 found, 1 not found or rejected, 2 invalid option or configuration, 3 service unavailable.

    Example: ergon facts get order-17-paid --from "Plant A"
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.get(service, from_zone, message_id, as_json=json))


@facts.command()
def fetch(
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    reader: Reader,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="Maximum number of facts to read.")
    ] = 100,
    from_offset: FromOffset = None,
    since: Since = None,
    confirm: Confirm = False,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: JsonLines = False,
) -> None:
    """Read facts after the reader's cursor, or re-read them from an offset or a time.

    Reading registers the reader. A registered reader delays the deletion of facts until it confirms them (--confirm) or
    is retired (ergon facts retire).

    Exit codes: 0 read, 1 rejected, 2 invalid option or configuration, 3 service unavailable: the printed facts were
    received but not confirmed.

    Example: ergon facts fetch --from "Plant A" --to HQ --reader ledger --confirm --json
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    options = work.FetchOptions(ZonePair(from_zone, to_zone), reader, from_offset, since, confirm=confirm)
    raise typer.Exit(work.fetch(service, options, limit=limit, as_json=json))


@facts.command()
def tail(
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    reader: Reader,
    from_offset: FromOffset = None,
    since: Since = None,
    confirm: Confirm = False,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: JsonLines = False,
) -> None:
    """Print facts as they arrive until Ctrl-C; reconnect if the connection is lost.

    Reading registers the reader. A registered reader delays the deletion of facts until it confirms them (--confirm) or
    is retired (ergon facts retire). Progress is shown on stderr while the reader catches up.

    Exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 rejected, 2 invalid option or configuration.

    Example: ergon facts tail --from "Plant A" --to HQ --reader watch
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    options = work.FetchOptions(ZonePair(from_zone, to_zone), reader, from_offset, since, confirm=confirm)
    raise typer.Exit(work.tail(service, options, as_json=json))


@facts.command()
def put(
    bucket: Bucket,
    key: ArtifactKey,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to store.")],
    *,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    zone: OwnerZone = "",
    json: Json = False,
) -> None:
    """Store a file as an artifact and print its digest and size; resume an interrupted upload.

    Exit codes: 0 stored, 1 rejected: the key is already used for different content, or the file changed during the
    upload, 2 invalid option or configuration, 3 interrupted: run the command again.

    Example: ergon facts put invoices 2026/17.pdf invoice.pdf
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.put(service, ObjectName(zone, bucket, key), file, as_json=json))


@facts.command()
def cat(
    bucket: Bucket,
    key: ArtifactKey,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", show_default="stdout", help="Output file.")
    ] = None,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    zone: OwnerZone = "",
) -> None:
    """Print an artifact, or write it to a file that appears only when it is complete and verified.

    An artifact that a fact of another zone references is owned by that zone: pass that zone with --zone.

    Exit codes: 0 complete and digest verified, 1 not found, lost or damaged, 2 invalid option or configuration,
    3 interrupted.

    Example: ergon facts cat invoices 2026/17.pdf -o invoice.pdf
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.cat(service, ObjectName(zone, bucket, key), output))


@facts.command()
def lag(
    *,
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: JsonLines = False,
) -> None:
    """Show how many facts each pair of zones retains, and how many of them each reader has not confirmed.

    With a zone's certificate, only the pairs of that zone are shown; with an operator's certificate, all pairs.

    Exit codes: 0 shown, 1 rejected, 2 invalid option or configuration, 3 service unavailable.

    Example: ergon facts lag
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(work.show_lag(service, as_json=json))


@facts.command()
def retire(
    reader: Annotated[str, typer.Argument(metavar="READER", help="Reader to retire.")],
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    yes: Yes = False,
    actor: Actor = "",
    server: Server,
    tls_cert: Cert,
    tls_key: Key,
    tls_ca: Authorities,
    server_name: ServerName = None,
    timeout: Timeout = "10s",  # type: ignore[assignment]  # typer parses the default too
    json: Json = False,
) -> None:
    """Remove a reader so that it no longer delays the deletion of facts; its unread facts may then be deleted.

    Requires an operator's certificate. The store records the time and the name in the certificate, followed by --actor
    in parentheses if it differs.

    Exit codes: 0 retired, 1 unknown reader, rejected, or confirmation declined or not answered, 2 invalid option or
    configuration, 3 service unavailable.

    Example: ergon facts retire old-ledger --from "Plant A" --to HQ
    """
    service = work.ServiceOptions(server, tls_cert, tls_key, tls_ca, server_name, timeout)
    raise typer.Exit(
        work.retire(
            service, reader, ZonePair(from_zone, to_zone), actor=resolve_actor_name(actor), confirmed=yes, as_json=json
        )
    )


facts.command()(replicate)
facts.add_typer(epoch, name="epoch")
