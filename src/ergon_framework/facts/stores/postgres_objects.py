"""Objects: names of artifacts in PostgreSQL, and their bytes in contents beside it.

A content that is stored but not named yet must not be removed under way. Whoever names one holds a lock of the database
from before it is sealed until its name is committed; it ends with his session, so nobody has to guess whether he lives.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from ergon_framework.facts import observe
from ergon_framework.facts.boundary import KnownObject
from ergon_framework.facts.contents import ByteBudget, Contents, Receiving
from ergon_framework.facts.errors import ArtifactLost, InvalidFactError
from ergon_framework.facts.model import ObjectName, Pair, Side, Stored
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores import refusals
from ergon_framework.facts.stores.postgres_batch import hexadecimal
from ergon_framework.facts.stores.postgres_store import Store
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Seconds that sealing and naming one artifact may take; of a large one on a slow store it is long.
SEALING: Final = 3600.0
#: And all else.
ASKING: Final = 30.0
#: Seconds without a byte after which an upload that can be gone on with is removed, if there is no room for another.
IDLE: Final = 60.0


class Upload:
    """One artifact as it comes in; the digest is made here only if nobody has said what it will be.

    *fits* says of each piece whether there is room for it. Without room, what has been announced is refused; what may
    be stored already is hashed and not kept, so that it can be compared with what is.
    """

    def __init__(
        self, name: ObjectName, receiving: Receiving, expected: Stored | None, fits: Callable[[Upload, int], bool]
    ) -> None:
        self.name = name
        self.receiving = receiving
        self.expected = expected
        self.is_kept = True
        self._fits = fits
        self._hash = hashlib.sha256() if expected is None else None
        self._size = 0

    def add(self, piece: bytes) -> None:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(piece).__name__}")
        if self._hash is not None:
            self._hash.update(piece)
            self._size += len(piece)
        self.is_kept = self.is_kept and self._fits(self, len(piece))
        if self.is_kept:
            self.receiving.add(bytes(piece))

    @property
    def stored(self) -> Stored:
        """What it is, or is said to be."""
        if self.expected is not None:
            return self.expected
        digest = "" if self._hash is None else self._hash.hexdigest()
        return Stored(f"sha256:{digest}", self._size)


class Objects:
    """The artifacts of one store. All of it blocks; the async flavour calls it in threads."""

    def __init__(
        self,
        contents: Contents,
        *,
        side: Side,
        store: Callable[[], Store],
        max_bytes: int | None,
        now: Callable[[], int],
    ) -> None:
        self._contents = contents
        self._side = side
        self._store = store
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes)
        self._now = now

    # -- taking in ------------------------------------------------------------------------------------

    def put(self, name: ObjectName, blob: Iterable[bytes], expected: Stored | None, begin: int) -> Stored:
        """Store what *blob* yields."""
        with self.receiving(name, expected, begin) as upload:
            if isinstance(upload, Stored):
                return upload
            for piece in blob:
                upload.add(piece)
            return self.keep(upload)

    @contextmanager
    def receiving(self, name: ObjectName, expected: Stored | None, begin: int) -> Iterator[Upload | Stored]:
        """An upload that may be added to and kept, or what is stored if all of it is here."""
        try:
            with ExitStack() as opened:
                begun = self._begin(opened, name, expected, begin)
                if isinstance(begun, Stored):
                    observe.put(self._side.store_buffer, "repeated")
                    yield begun
                else:
                    yield Upload(name, begun, expected, self._fits)
        except BaseException as error:
            observe.put_failed(self._side.store_buffer, error)
            raise

    def _begin(self, opened: ExitStack, name: ObjectName, expected: Stored | None, begin: int) -> Receiving | Stored:
        """Open the upload until *opened* is closed; Stored if all of it is here."""
        upload = None if expected is None else _upload(name, expected)
        stored = self._stored(name, expected, begin) or self._check_room(name, expected)
        if stored is not None:
            return stored
        try:
            return opened.enter_context(self._contents.receive(upload, begin=begin))
        except InvalidFactError:
            # Another call has sealed the upload since it was looked for.
            stored = self._stored(name, expected, begin)
            if stored is None:
                raise
            return stored

    def _stored(self, name: ObjectName, expected: Stored | None, begin: int) -> Stored | None:
        """Return what is stored under that name, for a caller that goes on at *begin*; None if there is more to come.

        While another call seals the same upload, its bytes are no upload any more and have no name yet: wait until the
        name is committed, or the other call has failed.
        """
        if begin == 0:
            return None
        here = 0
        if expected is not None:
            for wait in (False, True):
                if wait:
                    self._wait_for_naming(expected)
                # In this order: a sealed upload that is not found here may have its name by now.
                here = self._contents.received(_upload(name, expected))
                if 0 < begin <= here:
                    return None
                if self._is_stored(name, expected):
                    here = expected.size
                    if 0 < begin <= here:
                        return expected
        raise refusals.too_far(name, begin, here)

    def _wait_for_naming(self, expected: Stored) -> None:
        """Return when no call is between sealing the content and committing its name."""
        store = self._store()
        store.lines.run(_wait_for_naming(store, expected), within=ASKING)

    def _is_stored(self, name: ObjectName, expected: Stored) -> bool:
        known = self._asked(name, statements.OBJECT)
        return known is not None and known.stored == expected and self._contents.size_of(expected.digest) is not None

    def _check_room(self, name: ObjectName, expected: Stored | None) -> Stored | None:
        """Refuse what is announced larger than there is room for, before a byte of it is here.

        What is stored already is answered, though there is no room for its bytes a second time.
        """
        if self._max_bytes is None:
            return None
        used = self._budget.measure(self._measure)
        if expected is None:
            return None
        lacking = expected.size - self._contents.received(_upload(name, expected))
        if used + lacking <= self._max_bytes:
            return None
        known = self._asked(name, statements.OBJECT)
        if known is not None and known.stored == expected and self._contents.size_of(expected.digest) == expected.size:
            return expected
        if self._sweep() and (used := self._budget.measure(self._measure)) + lacking <= self._max_bytes:
            return None
        raise refusals.no_room(name, expected.size, used, self._max_bytes)

    def _fits(self, upload: Upload, size: int) -> bool:
        """Count bytes that have come; False if they are only compared with what has that name."""
        used = self._budget.take(size, self._measure)
        if used is not None:
            # Once more before it is refused: the count may be older than what others have removed.
            self._sweep()
            self._budget.measure(self._measure)
            used = self._budget.take(size, self._measure)
        if used is None:
            return True
        if upload.expected is None and self._asked(upload.name, statements.OBJECT) is not None:
            return False
        raise refusals.no_room(upload.name, None, used, self._max_bytes or 0)

    def _measure(self) -> int:
        """Bytes of facts, of artifacts, and of uploads that are not sealed."""
        store = self._store()
        return store.lines.run(_used(store), within=ASKING) + self._contents.upload_bytes()

    def _sweep(self) -> int:
        """Where there is no room, an upload that broke off gives way to one that comes."""
        return self._contents.sweep(self._now() - int(IDLE * 1000))

    def keep(self, upload: Upload) -> Stored:
        """Seal it and give it its name; returns when both are durable."""
        store = self._store()
        if not upload.is_kept:
            given = upload.stored
            if not store.lines.run(_found(upload.name, given), within=ASKING):
                raise refusals.no_room(upload.name, given.size, self._measure(), self._max_bytes or 0)
            observe.put(self._side.store_buffer, "repeated")
            return given
        stored, first = store.lines.run(self._kept(store, upload), within=SEALING)
        observe.put(self._side.store_buffer, "stored" if first else "repeated")
        return stored

    def _kept(self, store: Store, upload: Upload) -> Operation[tuple[Stored, bool]]:
        yield from store.opened()
        given = upload.stored
        place = upload.name._asdict()
        content = {"digest": hexadecimal(given.digest), "size": given.size, "now": self._now()}
        named = yield from _found(upload.name, given)
        yield from self._held(content)
        sealed = (yield Query(statements.IS_SEALED, content)) == [(True,)]
        # Before the bytes are put in order, which may take long; and once more when nobody can come in between.
        yield from self._room(statements.USED, given, exempt=named or sealed)
        made = upload.receiving.seal(upload.expected)
        if made != given:
            raise refusals.mismatch(upload.name, given, made)
        yield from self._room(statements.ROOM, given, exempt=named or sealed)
        yield Query(statements.SEALED, content)
        first = bool((yield Query(statements.NAME, {**content, **place})))
        if not first:
            yield from _found(upload.name, given)
        yield COMMIT
        return given, first

    def _held(self, content: dict[str, object]) -> Operation[None]:
        """Begin a database transaction in which nobody removes the content, whose row is committed."""
        while True:
            yield Query(statements.MAKE_CONTENT, content)
            yield BEGIN
            yield Query(statements.HOLD_CONTENT, content)
            if (yield Query(statements.CONTENT, content)):
                return
            # It was removed in between.
            yield ROLLBACK

    def _room(self, statement: str, given: Stored, *, exempt: bool) -> Operation[None]:
        if self._max_bytes is None or exempt:
            return
        ((used,),) = yield Query(statement)
        if used + given.size > self._max_bytes:
            raise refusals.full("bytes", int(used), self._max_bytes)

    def received(self, name: ObjectName, expected: Stored) -> int:
        """Bytes of an upload that are here."""
        return expected.size if self._is_stored(name, expected) else self._contents.received(_upload(name, expected))

    # -- giving out -----------------------------------------------------------------------------------

    def read(self, name: ObjectName, begin: int) -> Iterator[bytes]:
        """The artifact from *begin* on; damage is found at the end of one that is read from its beginning."""
        known = self._asked(name, statements.NAMED_OBJECT)
        if known is None:
            raise refusals.missing(name, "is missing", None)
        made = hashlib.sha256()
        for piece in self._pieces(name, known, begin):
            made.update(piece)
            yield piece
        if begin == 0 and f"sha256:{made.hexdigest()}" != known.stored.digest:
            raise self._lost(name, known, "is damaged")

    def _pieces(self, name: ObjectName, known: _Row, begin: int) -> Iterator[bytes]:
        try:
            pieces = self._contents.read(known.stored.digest, begin=begin)
            piece = next(pieces, None)
            while piece is not None:
                yield piece
                piece = next(pieces, None)
        except KeyError:
            raise self._lost(name, known, "is missing") from None

    def _lost(self, name: ObjectName, known: _Row, what: str) -> Exception:
        store = self._store()
        by = store.lines.run(_named_by(known.id), within=ASKING)
        error = refusals.missing(name, what, by)
        if isinstance(error, ArtifactLost):
            observe.lost(self._side.store_buffer, error)
        return error

    def _asked(self, name: ObjectName, statement: str) -> _Row | None:
        store = self._store()
        return store.lines.run(_object(store, name, statement), within=ASKING)

    def known(self, name: ObjectName) -> KnownObject | None:
        """By what it is recognised, whose it is, and who names it."""
        store = self._store()
        return store.lines.run(_known(store, name), within=ASKING)

    # -- facts that name them -------------------------------------------------------------------------

    def absent(self, digests: frozenset[str]) -> frozenset[str]:
        """Those of *digests* whose bytes are not here."""
        return frozenset(digest for digest in digests if self._contents.size_of(digest) is None)


async def put_async(
    objects: Objects, name: ObjectName, blob: AsyncIterable[bytes], *, expected: Stored | None, begin: int
) -> Stored:
    """Store what *blob* yields, in one thread: what was begun there ends there, in order, also if nobody waits."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="ergon-facts-upload")
    run = partial(asyncio.get_running_loop().run_in_executor, thread)
    receiving = objects.receiving(name, expected, begin)
    try:
        upload = await run(receiving.__enter__)
        try:
            stored = upload if isinstance(upload, Stored) else await _filled(objects, upload, blob, run)
        except BaseException as error:
            left = run(partial(receiving.__exit__, type(error), error, error.__traceback__))
            with suppress(type(error)):
                await asyncio.shield(left)
            raise
        await run(receiving.__exit__, None, None, None)
        return stored
    finally:
        thread.shutdown(wait=False)


async def _filled(
    objects: Objects, upload: Upload, blob: AsyncIterable[bytes], run: Callable[..., Awaitable[Any]]
) -> Stored:
    async for piece in blob:
        await run(upload.add, piece)
    stored: Stored = await run(objects.keep, upload)
    return stored


class _Row(NamedTuple):
    """An artifact as the database has it."""

    id: int
    stored: Stored
    zone: str


def _used(store: Store) -> Operation[int]:
    yield from store.opened()
    found = yield Query(statements.USED)
    return int(found[0][0]) if found else 0


def _object(store: Store, name: ObjectName, statement: str) -> Operation[_Row | None]:
    yield from store.opened()
    return (yield from _row(name, statement))


def _row(name: ObjectName, statement: str) -> Operation[_Row | None]:
    rows = yield Query(statement, name._asdict())
    if not rows:
        return None
    number, digest, size, zone = rows[0]
    return _Row(number, Stored(f"sha256:{digest}", size), zone)


def _wait_for_naming(store: Store, expected: Stored) -> Operation[None]:
    yield from store.opened()
    yield BEGIN
    yield Query(statements.AWAIT_CONTENT, {"digest": hexadecimal(expected.digest)})
    yield COMMIT


def _found(name: ObjectName, given: Stored) -> Operation[bool]:
    """Whether the name is given; to another content it is a conflict."""
    known = yield from _row(name, statements.OBJECT)
    if known is not None and known.stored != given:
        raise refusals.taken(name, known.stored, given)
    return known is not None


def _known(store: Store, name: ObjectName) -> Operation[KnownObject | None]:
    found = yield from _object(store, name, statements.NAMED_OBJECT)
    if found is None:
        return None
    rows = yield Query(statements.NAMERS, {"object": found.id})
    return KnownObject(found.stored, frozenset(Pair(*row) for row in rows), found.zone)


def _named_by(number: int) -> Operation[tuple[str, str] | None]:
    rows = yield Query(statements.NAMED_BY, {"object": number})
    return (rows[0][0], rows[0][1]) if rows else None


def _upload(name: ObjectName, expected: Stored) -> str:
    """The name of an upload that can be gone on with."""
    owner = (name.zone,) if name.zone else ()
    told = "\n".join((*owner, name.bucket, name.key, expected.digest, str(expected.size)))
    return hashlib.sha256(told.encode()).hexdigest()
