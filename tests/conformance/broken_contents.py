"""Places for contents that break the contract on purpose, each in one way: the exam must find every one of them."""

from __future__ import annotations

import contextlib
import hashlib
import uuid

from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError
from ergon_framework.facts.stores.memory_contents import MemoryContents


class SealsAnything(MemoryContents):
    """Nobody looks at what was expected."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            seal = taken.seal
            taken.seal = lambda expected=None: seal()
            yield taken


class KeepsMismatches(MemoryContents):
    """What was not expected is refused and kept all the same."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            seal = taken.seal

            def kept(expected=None):
                try:
                    return seal(expected)
                except ArtifactMismatch:
                    content = bytes(taken.content)
                    self.contents[f"sha256:{hashlib.sha256(content).hexdigest()}"] = content
                    raise

            taken.seal = kept
            yield taken


class ComparesNoSize(MemoryContents):
    """What has the digest is what was expected."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            seal = taken.seal
            taken.seal = lambda expected=None: seal(expected and expected._replace(size=taken.size))
            yield taken


class ShowsHalves(MemoryContents):
    """What has come so far can be read."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            add = taken.add

            def shown(piece):
                add(piece)
                content = bytes(taken.content)
                self.contents[f"sha256:{hashlib.sha256(content).hexdigest()}"] = content

            taken.add = shown
            yield taken


class KeepsTheNameless(MemoryContents):
    """An upload without a name gets one, and stays."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        if upload is None and begin == 0:
            upload = uuid.uuid4().hex
        with super().receive(upload, begin=begin) as taken:
            yield taken


class ForgetsTheNamed(MemoryContents):
    """Whatever breaks off is gone."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            try:
                yield taken
            finally:
                self._uploads.pop(upload, None)


class GoesOnAtTheEnd(MemoryContents):
    """An upload goes on behind all that came, wherever it is told to."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        known = self._uploads.get(upload)
        with super().receive(upload, begin=begin) as taken:
            if begin:
                taken.content[:] = known.content
            yield taken


class FillsUp(MemoryContents):
    """Where nothing is, there are zeros."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        try:
            with super().receive(upload, begin=begin) as taken:
                yield taken
        except InvalidFactError:
            if begin < 1 or upload is None:
                raise
            with super().receive(upload) as taken:
                taken.content[:] = bytes(begin)
                yield taken


class NeverBeginsAnew(MemoryContents):
    """What has come under a name stays in front."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        known = self._uploads.get(upload)
        with super().receive(upload, begin=begin) as taken:
            if begin == 0 and known is not None:
                taken.content[:0] = known.content
            yield taken


class SharesUploads(MemoryContents):
    """Two may have the same upload in hand."""

    def check(self, upload):
        pass

    def forget(self, upload):
        self._uploads.pop(upload.upload, None)


class KeepsTheDamaged(MemoryContents):
    """What is there is believed to be whole."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        before = dict(self.contents)
        with super().receive(upload, begin=begin) as taken:
            yield taken
        self.contents.update({digest: content for digest, content in before.items() if digest in self.contents})


class CountsCopies(MemoryContents):
    """A content that was stored twice has to be removed twice."""

    def __init__(self, **given):
        super().__init__(**given)
        self._copies = {}

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            seal = taken.seal

            def counted(expected=None):
                stored = seal(expected)
                self._copies[stored.digest] = self._copies.get(stored.digest, 0) + 1
                return stored

            taken.seal = counted
            yield taken

    def remove(self, digest):
        self._copies[digest] = self._copies.get(digest, 0) - 1
        return super().remove(digest) if self._copies[digest] < 1 else digest in self.contents


class RemovesNothing(MemoryContents):
    """What was stored stays."""

    def remove(self, digest):
        return digest in self.contents


class ReadsAtOnce(MemoryContents):
    """A content comes in one piece, as large as it is."""

    def read(self, digest, *, begin=0):
        return iter([self.contents[digest][begin:]])


class ReadsFromTheStart(MemoryContents):
    """Wherever one begins, all of it comes."""

    def read(self, digest, *, begin=0):
        return super().read(digest)


class IsLenient(MemoryContents):
    """A digest may be written in any way."""

    def _lenient(self, digest):
        return f"sha256:{digest[-64:].lower()}"

    def size_of(self, digest):
        return super().size_of(self._lenient(digest))

    def read(self, digest, *, begin=0):
        return super().read(self._lenient(digest), begin=begin)


class SweepsTheYoung(MemoryContents):
    """Sweeping takes whatever is not sealed."""

    def sweep(self, before_unix_ms):
        return super().sweep(2**53)


class SweepsNothing(MemoryContents):
    """What breaks off lies there for ever."""

    def sweep(self, before_unix_ms):
        return 0


class TrustsNames(MemoryContents):
    """An upload may be called anything."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        safe = None if upload is None else f"n{hashlib.sha256(upload.encode()).hexdigest()}"
        with super().receive(safe, begin=begin) as taken:
            yield taken

    def received(self, upload):
        return super().received(f"n{hashlib.sha256(upload.encode()).hexdigest()}")


class TakesTexts(MemoryContents):
    """A text is taken for its bytes."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            add = taken.add
            taken.add = lambda piece: add(piece.encode() if isinstance(piece, str) else piece)
            yield taken


class HasOneBuffer(MemoryContents):
    """All uploads without a name come into the same place."""

    _buffer = None

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            if upload is None:
                if self._buffer is None:
                    self._buffer = bytearray()
                self._open = getattr(self, "_open", 0) + 1
                taken.content = self._buffer
            try:
                yield taken
            finally:
                if upload is None:
                    self._open -= 1
                    if not self._open:
                        self._buffer = None


class IsNeverFull(MemoryContents):
    """It takes whatever comes."""

    def make_sure_of_room(self, size):
        pass


class CallsItselfDurable(MemoryContents):
    """It says that it survives a loss of power."""

    @property
    def durable(self):
        return True


class SaysWhatWasExpected(MemoryContents):
    """The first byte is lost, and nobody hashes what is kept."""

    @contextlib.contextmanager
    def receive(self, upload=None, *, begin=0):
        with super().receive(upload, begin=begin) as taken:
            seal = taken.seal

            def careless(expected=None):
                stored = seal(expected)
                if len(taken.content) == 1:
                    self.contents[stored.digest] = b""
                return stored

            taken.seal = careless
            yield taken


class CountsNoUploads(MemoryContents):
    """What is not sealed counts for nothing."""

    def upload_bytes(self):
        return 0
