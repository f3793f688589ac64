"""Artifact names in PostgreSQL, and the bytes of artifacts in a separate content store.

An artifact is a file that facts reference by zone, bucket and key (its name). A content is the bytes of an artifact,
stored once for all names with the same digest.

A content that is stored but has no name yet must not be removed. A call that names a content holds a lock of the
database from before the content is committed until its name is committed. The lock ends with the database session,
so a crashed process does not keep it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query
from ergon_framework.facts import metrics
from ergon_framework.facts.boundary import ObjectInfo
from ergon_framework.facts.content_store import ByteBudget, ContentStore, ContentUpload
from ergon_framework.facts.errors import ArtifactLost, InvalidFactError
from ergon_framework.facts.model import BoundarySide, ObjectName, StoredArtifact, ZonePair
from ergon_framework.facts.stores import errors
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.append import digest_hex
from ergon_framework.facts.stores.postgres.session import DatabaseSession

#: Seconds for the commit of one artifact; a large one on a slow content store takes long.
COMMIT_TIMEOUT_SECONDS: Final = 3600.0
#: Seconds for every other call.
CALL_TIMEOUT_SECONDS: Final = 30.0
#: Seconds without a byte after which a resumable upload may be removed to free space for another.
IDLE_UPLOAD_SECONDS: Final = 60.0


class PostgresUpload:
    """One artifact upload; its digest is computed here only if the caller has not announced it.

    *reserve* tells of each chunk whether there is capacity for it. Without capacity, an announced upload is rejected;
    the bytes of an artifact that may be stored already are hashed and not written, so that they can be compared.
    """

    def __init__(
        self,
        name: ObjectName,
        content_upload: ContentUpload,
        expected: StoredArtifact | None,
        reserve: Callable[[PostgresUpload, int], bool],
    ) -> None:
        self.name = name
        self.content_upload = content_upload
        self.expected = expected
        #: False as soon as *reserve* has returned False once: the rest is then only hashed, and compared at the end.
        self.is_written = True
        self._reserve = reserve
        self._hash = hashlib.sha256() if expected is None else None
        self._size = 0

    def add(self, chunk: bytes) -> None:
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(chunk).__name__}")
        if self._hash is not None:
            self._hash.update(chunk)
            self._size += len(chunk)
        self.is_written = self.is_written and self._reserve(self, len(chunk))
        if self.is_written:
            self.content_upload.add(bytes(chunk))

    @property
    def stored(self) -> StoredArtifact:
        """The digest and size, as announced or as received."""
        if self.expected is not None:
            return self.expected
        digest = "" if self._hash is None else self._hash.hexdigest()
        return StoredArtifact(f"sha256:{digest}", self._size)


class PostgresArtifacts:
    """The artifacts of one store. All methods block; the async variant calls them in threads."""

    def __init__(
        self,
        contents: ContentStore,
        *,
        side: BoundarySide,
        get_session: Callable[[], DatabaseSession],
        max_bytes: int | None,
        now: Callable[[], int],
    ) -> None:
        self._contents = contents
        self._side = side
        self._get_session = get_session
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes)
        self._now = now

    # -- upload ---------------------------------------------------------------------------------------

    def put(
        self, name: ObjectName, blob: Iterable[bytes], expected: StoredArtifact | None, begin: int
    ) -> StoredArtifact:
        """Store what *blob* yields."""
        with self.open_upload(name, expected, begin) as upload:
            if isinstance(upload, StoredArtifact):
                return upload
            for chunk in blob:
                upload.add(chunk)
            return self.store(upload)

    @contextmanager
    def open_upload(
        self, name: ObjectName, expected: StoredArtifact | None, begin: int
    ) -> Iterator[PostgresUpload | StoredArtifact]:
        """Yield an upload that accepts bytes, or the stored artifact if all of it is stored."""
        try:
            with ExitStack() as stack:
                result = self._begin(stack, name, expected, begin)
                if isinstance(result, StoredArtifact):
                    metrics.record_put(self._side.store_buffer, "repeated")
                    yield result
                else:
                    yield PostgresUpload(name, result, expected, self._reserve)
        except BaseException as error:
            metrics.record_put_failure(self._side.store_buffer, error)
            raise

    def _begin(
        self, stack: ExitStack, name: ObjectName, expected: StoredArtifact | None, begin: int
    ) -> ContentUpload | StoredArtifact:
        """Open the upload until *stack* is closed; return the stored artifact if all of it is stored."""
        upload_name = None if expected is None else _make_upload_name(name, expected)
        stored = self._find_stored(name, expected, begin) or self._check_capacity(name, expected)
        if stored is not None:
            return stored
        try:
            return stack.enter_context(self._contents.begin_upload(upload_name, begin=begin))
        except InvalidFactError:
            # Another call has committed the upload in between.
            stored = self._find_stored(name, expected, begin)
            if stored is None:
                raise
            return stored

    def _find_stored(self, name: ObjectName, expected: StoredArtifact | None, begin: int) -> StoredArtifact | None:
        """Return the stored artifact for a caller that resumes at *begin*, or None if bytes are missing.

        While another call commits the same upload, its bytes have neither an upload nor a name: wait until the name is
        committed, or the other call has failed.
        """
        if begin == 0:
            return None
        stored_bytes = 0
        if expected is not None:
            for wait in (False, True):
                if wait:
                    self._wait_for_naming(expected)
                # In this order: an upload that was committed before the first check has its name at the second.
                stored_bytes = self._contents.uploaded_bytes(_make_upload_name(name, expected))
                if 0 < begin <= stored_bytes:
                    return None
                if self._is_stored(name, expected):
                    stored_bytes = expected.size
                    if 0 < begin <= stored_bytes:
                        return expected
        raise errors.upload_offset_error(name, begin, stored_bytes)

    def _wait_for_naming(self, expected: StoredArtifact) -> None:
        """Wait until no call is between committing the content and committing its name."""
        session = self._get_session()
        session.pool.run(_wait_for_naming(session, expected), timeout_seconds=CALL_TIMEOUT_SECONDS)

    def _is_stored(self, name: ObjectName, expected: StoredArtifact) -> bool:
        row = self._fetch_row(name, statements.SELECT_ARTIFACT)
        return row is not None and row.stored == expected and self._contents.size_of(expected.digest) is not None

    def _check_capacity(self, name: ObjectName, expected: StoredArtifact | None) -> StoredArtifact | None:
        """Reject an announced artifact that exceeds the capacity, before any of its bytes are stored.

        An artifact that is stored already is returned, because its bytes need no further space.
        """
        if self._max_bytes is None:
            return None
        used = self._budget.measure(self._measure)
        if expected is None:
            return None
        missing_bytes = expected.size - self._contents.uploaded_bytes(_make_upload_name(name, expected))
        if used + missing_bytes <= self._max_bytes:
            return None
        row = self._fetch_row(name, statements.SELECT_ARTIFACT)
        if row is not None and row.stored == expected and self._contents.size_of(expected.digest) == expected.size:
            return expected
        if (
            self._delete_idle_uploads()
            and (used := self._budget.measure(self._measure)) + missing_bytes <= self._max_bytes
        ):
            return None
        raise errors.no_capacity_error(name, expected.size, used, self._max_bytes)

    def _reserve(self, upload: PostgresUpload, size: int) -> bool:
        """Reserve space for received bytes; return False if they are only compared with the stored artifact."""
        used = self._budget.reserve(size, self._measure)
        if used is not None:
            # Measured again before the rejection: the count may not include what others have removed.
            self._delete_idle_uploads()
            self._budget.measure(self._measure)
            used = self._budget.reserve(size, self._measure)
        if used is None:
            return True
        if upload.expected is None and self._fetch_row(upload.name, statements.SELECT_ARTIFACT) is not None:
            return False
        raise errors.no_capacity_error(upload.name, None, used, self._max_bytes or 0)

    def _measure(self) -> int:
        """Return the bytes of facts, artifacts and uncommitted uploads."""
        session = self._get_session()
        return (
            session.pool.run(_read_used_bytes(session), timeout_seconds=CALL_TIMEOUT_SECONDS)
            + self._contents.upload_bytes()
        )

    def _delete_idle_uploads(self) -> int:
        """Remove idle interrupted uploads to free space for a new one."""
        return self._contents.delete_stale_uploads(self._now() - int(IDLE_UPLOAD_SECONDS * 1000))

    def store(self, upload: PostgresUpload) -> StoredArtifact:
        """Commit the content and its name; return when both are durable."""
        session = self._get_session()
        if not upload.is_written:
            uploaded = upload.stored
            if not session.pool.run(_match_stored(upload.name, uploaded), timeout_seconds=CALL_TIMEOUT_SECONDS):
                raise errors.no_capacity_error(upload.name, uploaded.size, self._measure(), self._max_bytes or 0)
            metrics.record_put(self._side.store_buffer, "repeated")
            return uploaded
        stored, is_new = session.pool.run(self._commit(session, upload), timeout_seconds=COMMIT_TIMEOUT_SECONDS)
        metrics.record_put(self._side.store_buffer, "stored" if is_new else "repeated")
        return stored

    def _commit(self, session: DatabaseSession, upload: PostgresUpload) -> Operation[tuple[StoredArtifact, bool]]:
        """Commit the content, then its name; return the artifact, and whether the name is new."""
        yield from session.ensure_open()
        uploaded = upload.stored
        name_columns = upload.name._asdict()
        content = {"digest": digest_hex(uploaded.digest), "size": uploaded.size, "now": self._now()}
        is_named = yield from _match_stored(upload.name, uploaded)
        yield from self._hold_content(content)
        is_committed = (yield Query(statements.IS_CONTENT_COMMITTED, content)) == [(True,)]
        # Checked before the content is committed, which may take long, and again under the lock.
        yield from self._check_bytes(statements.USED_BYTES, uploaded, exempt=is_named or is_committed)
        committed = upload.content_upload.commit(upload.expected)
        if committed != uploaded:
            raise errors.artifact_mismatch_error(upload.name, uploaded, committed)
        yield from self._check_bytes(statements.LOCK_USED_BYTES, uploaded, exempt=is_named or is_committed)
        yield Query(statements.COMMIT_CONTENT, content)
        is_new = bool((yield Query(statements.INSERT_ARTIFACT, {**content, **name_columns})))
        if not is_new:
            yield from _match_stored(upload.name, uploaded)
        yield COMMIT
        return uploaded, is_new

    def _hold_content(self, content: dict[str, object]) -> Operation[None]:
        """Begin a database transaction in which the content cannot be removed; its row is committed."""
        while True:
            yield Query(statements.INSERT_CONTENT, content)
            yield BEGIN
            yield Query(statements.LOCK_CONTENT_SHARED, content)
            if (yield Query(statements.CONTENT_EXISTS, content)):
                return
            # It was removed in between.
            yield ROLLBACK

    def _check_bytes(self, statement: str, stored: StoredArtifact, *, exempt: bool) -> Operation[None]:
        if self._max_bytes is None or exempt:
            return
        ((used,),) = yield Query(statement)
        if used + stored.size > self._max_bytes:
            raise errors.buffer_full_error("bytes", int(used), self._max_bytes)

    def uploaded_bytes(self, name: ObjectName, expected: StoredArtifact) -> int:
        """Return how many bytes of an upload are stored."""
        return (
            expected.size
            if self._is_stored(name, expected)
            else self._contents.uploaded_bytes(_make_upload_name(name, expected))
        )

    # -- read -----------------------------------------------------------------------------------------

    def read(self, name: ObjectName, begin: int) -> Iterator[bytes]:
        """Yield the artifact from *begin*; damage is detected at the end of a read that began at byte 0."""
        row = self._fetch_row(name, statements.SELECT_READABLE_ARTIFACT)
        if row is None:
            raise errors.artifact_lost_error(name, "is missing", None)
        hasher = hashlib.sha256()
        for chunk in self._read_chunks(name, row, begin):
            hasher.update(chunk)
            yield chunk
        if begin == 0 and f"sha256:{hasher.hexdigest()}" != row.stored.digest:
            raise self._lost_error(name, row, "is damaged")

    def _read_chunks(self, name: ObjectName, row: _ArtifactRow, begin: int) -> Iterator[bytes]:
        try:
            chunks = self._contents.read(row.stored.digest, begin=begin)
            chunk = next(chunks, None)
            while chunk is not None:
                yield chunk
                chunk = next(chunks, None)
        except KeyError:
            raise self._lost_error(name, row, "is missing") from None

    def _lost_error(self, name: ObjectName, row: _ArtifactRow, problem: str) -> Exception:
        session = self._get_session()
        referencing_fact = session.pool.run(_find_referencing_fact(row.id), timeout_seconds=CALL_TIMEOUT_SECONDS)
        error = errors.artifact_lost_error(name, problem, referencing_fact)
        if isinstance(error, ArtifactLost):
            metrics.record_lost_artifact(self._side.store_buffer, error)
        return error

    def _fetch_row(self, name: ObjectName, statement: str) -> _ArtifactRow | None:
        session = self._get_session()
        return session.pool.run(_open_and_read_row(session, name, statement), timeout_seconds=CALL_TIMEOUT_SECONDS)

    def stat(self, name: ObjectName) -> ObjectInfo | None:
        """Return digest, size and owner of an artifact, and the pairs of zones that reference it."""
        session = self._get_session()
        return session.pool.run(_stat(session, name), timeout_seconds=CALL_TIMEOUT_SECONDS)

    # -- contents that facts reference ----------------------------------------------------------------

    def missing_digests(self, digests: frozenset[str]) -> frozenset[str]:
        """Return the *digests* whose contents are not stored."""
        return frozenset(digest for digest in digests if self._contents.size_of(digest) is None)


async def put_async(
    artifacts: PostgresArtifacts,
    name: ObjectName,
    blob: AsyncIterable[bytes],
    *,
    expected: StoredArtifact | None,
    begin: int,
) -> StoredArtifact:
    """Store what *blob* yields in one thread, which also finishes the cleanup if the caller is cancelled."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="ergon-facts-upload")
    run_in_thread = partial(asyncio.get_running_loop().run_in_executor, executor)
    context = artifacts.open_upload(name, expected, begin)
    try:
        upload = await run_in_thread(context.__enter__)
        try:
            stored = (
                upload
                if isinstance(upload, StoredArtifact)
                else await _upload_all(artifacts, upload, blob, run_in_thread)
            )
        except BaseException as error:
            cleanup = run_in_thread(partial(context.__exit__, type(error), error, error.__traceback__))
            with suppress(type(error)):
                await asyncio.shield(cleanup)
            raise
        await run_in_thread(context.__exit__, None, None, None)
        return stored
    finally:
        executor.shutdown(wait=False)


async def _upload_all(
    artifacts: PostgresArtifacts,
    upload: PostgresUpload,
    blob: AsyncIterable[bytes],
    run_in_thread: Callable[..., Awaitable[Any]],
) -> StoredArtifact:
    async for chunk in blob:
        await run_in_thread(upload.add, chunk)
    stored: StoredArtifact = await run_in_thread(artifacts.store, upload)
    return stored


class _ArtifactRow(NamedTuple):
    """An artifact as the database has it."""

    id: int
    stored: StoredArtifact
    zone: str


def _read_used_bytes(session: DatabaseSession) -> Operation[int]:
    yield from session.ensure_open()
    rows = yield Query(statements.USED_BYTES)
    return int(rows[0][0]) if rows else 0


def _open_and_read_row(session: DatabaseSession, name: ObjectName, statement: str) -> Operation[_ArtifactRow | None]:
    yield from session.ensure_open()
    return (yield from _read_row(name, statement))


def _read_row(name: ObjectName, statement: str) -> Operation[_ArtifactRow | None]:
    rows = yield Query(statement, name._asdict())
    if not rows:
        return None
    object_id, digest, size, zone = rows[0]
    return _ArtifactRow(object_id, StoredArtifact(f"sha256:{digest}", size), zone)


def _wait_for_naming(session: DatabaseSession, expected: StoredArtifact) -> Operation[None]:
    yield from session.ensure_open()
    yield BEGIN
    yield Query(statements.LOCK_CONTENT, {"digest": digest_hex(expected.digest)})
    yield COMMIT


def _match_stored(name: ObjectName, stored: StoredArtifact) -> Operation[bool]:
    """Tell whether the name exists; raise a conflict if it has another content."""
    row = yield from _read_row(name, statements.SELECT_ARTIFACT)
    if row is not None and row.stored != stored:
        raise errors.artifact_conflict_error(name, row.stored, stored)
    return row is not None


def _stat(session: DatabaseSession, name: ObjectName) -> Operation[ObjectInfo | None]:
    row = yield from _open_and_read_row(session, name, statements.SELECT_READABLE_ARTIFACT)
    if row is None:
        return None
    pairs = yield Query(statements.REFERENCING_PAIRS, {"object": row.id})
    return ObjectInfo(row.stored, frozenset(ZonePair(*pair) for pair in pairs), row.zone)


def _find_referencing_fact(object_id: int) -> Operation[tuple[str, str] | None]:
    rows = yield Query(statements.REFERENCING_FACT, {"object": object_id})
    return (rows[0][0], rows[0][1]) if rows else None


def _make_upload_name(name: ObjectName, expected: StoredArtifact) -> str:
    """Return the name of a resumable upload."""
    owner = (name.zone,) if name.zone else ()
    identity = "\n".join((*owner, name.bucket, name.key, expected.digest, str(expected.size)))
    return hashlib.sha256(identity.encode()).hexdigest()
