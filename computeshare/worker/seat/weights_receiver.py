"""A worker's weights on their way: a version whole, or by the differences that lead to it."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from computeshare.codecs.messages import add_delta, decode_weights, is_news, weights_parts, weights_room
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.protocol.worker_session import Grant, Member, Pulled
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Blob, Vector


class Inbox:
    """The versions of one job as a worker gets them; of those that come as differences it keeps the last weights.

    Each is compared with the digest in its token, in a thread, while the worker computes on it.
    """

    def __init__(self, member: Member, codec: str, layout: Layout, into: Vector | None = None) -> None:
        """`into`: where parameters (d,) of versions that come whole are decoded; by default each gets a vector."""
        self._into = into
        self._member, self._codec, self._layout = member, CODECS[codec], layout
        self._chained = self._codec.differences
        self._room = weights_room(layout)
        self._held: Weights | None = None
        self._token = ""
        """Of the version held."""
        self._helper = ThreadPoolExecutor(1, "digest")
        self._digest: tuple[str, Future[str]] | None = None
        """Of the weights that came last, with their token."""
        self.parts = weights_parts(layout)
        """How many a version's weights come in."""
        self.with_news = is_news(layout)
        """Whether they come with the news of the version."""
        self.bytes = 0
        """Of what has come."""

    def pull(self, token: str) -> tuple[Weights | None, Grant]:
        """A version's weights, None if they are gone, and a lease on its round. Raises CodecError."""
        self._settle()
        if not self._chained:
            message, grant = self._member.pull(token, self.parts, self._room)
            return None if message is None else self._whole(token, message), grant
        pulled, grant = self._member.follow(self._token, token, self.parts, self._room)
        return None if pulled is None else self._followed(token, pulled), grant

    def decoded(self, grant: Grant) -> Weights:
        """The weights that came with the news of a version. Raises CodecError."""
        self._settle()
        if self._chained:
            return self._followed(grant.token, Pulled(None, [grant.weights]))
        return self._whole(grant.token, grant.weights)

    def is_right(self) -> bool:
        """Whether the weights that came last match the digest in their token; waits until that is known."""
        if self._digest is None:
            return False
        token, digest = self._digest
        return token.endswith(digest.result()[:16])

    def forget(self) -> None:
        """Take the weights that came last for damaged: the next version begins with whole ones."""
        self._held, self._token, self._digest = None, "", None

    def _settle(self) -> None:
        """Wait for the digest: what comes next may lie where those weights do."""
        if self._digest:
            wait([self._digest[1]])

    def _compare(self, token: str, weights: Weights) -> Weights:
        self._digest = token, self._helper.submit(self._layout.digest, weights)
        return weights

    def _whole(self, token: str, message: Sequence[Blob]) -> Weights:
        self.bytes += sum(map(len, message))
        return self._compare(token, decode_weights(self._codec, message, self._layout, self._into))

    def _followed(self, token: str, pulled: Pulled) -> Weights:
        """The weights of a version, from what leads to it, kept for the next differences."""
        weights = self._held
        if pulled.whole:
            self.bytes += sum(map(len, pulled.whole))
            weights = decode_weights(EXACT, pulled.whole, self._layout)
        assert weights is not None  # a way that begins with those held was given because they are
        for message in pulled.deltas:
            self.bytes += sum(map(len, message))
            weights = add_delta(self._codec, message, self._layout, weights)
        self._held, self._token = weights, token
        return self._compare(token, weights)
