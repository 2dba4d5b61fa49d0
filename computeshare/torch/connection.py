"""A module's weights, averaged in pairs with those of other processes of a group, through the broker."""

import hashlib
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import structlog
from redis import Redis
from redis.exceptions import RedisError
from torch import nn

from computeshare.codecs.messages import UpdateEncoder, decode_update, update_parts
from computeshare.codecs.registry import CODECS
from computeshare.errors import SettingsError
from computeshare.gossip.exchange import Partners, PeerExchange
from computeshare.gossip.peer_weights import GroupWeights, PublishedNotice
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.strategies.base import Averaging
from computeshare.strategies.registry import parse_strategy
from computeshare.tasks.modules import layout_of, load_weights, weights_of
from computeshare.tensors.layout import Layout, Weights
from computeshare.torch.group_broker import connect_group
from computeshare.types import Message, Vector

AVERAGED_BY = (
    "divergence_threshold", "factor", "fetch_probability", "interpolation", "matching", "max_norm", "timeout_ms"
)  # fmt: skip
"""The strategy's fields that a loop of one's own leaves open: it decides by itself how it steps, and how often."""
log = structlog.get_logger()


class Connection:
    """One process's part in a group; see `computeshare.torch`. Use it from one thread."""

    def __init__(self, module: nn.Module, redis: Redis, group: str, name: str, averaging: Averaging, codec: str):
        """As `connect`. Raises SpecError: a tensor of the module is neither float32 nor an int64 buffer."""
        self.name = name
        self._module, self._layout = module, layout_of(module)
        self._codec, self._token = CODECS[codec], _token(self._layout, codec)
        self._board = GroupWeights(redis, group, name)
        partners = Partners(name, 0, averaging.matching)
        self._exchange = PeerExchange(averaging, self._board, partners, update_parts(self._layout), self._decode)
        self._encoder = UpdateEncoder(self._codec, self._layout)
        self._helper = ThreadPoolExecutor(1, "publishing")
        self._sending: Future[None] | None = None
        self._units = 0
        self._remarks = Seldom(REMARK_EVERY_S)
        self.met: dict[str, Any] = {}
        """Of the last exchange: `peer`, `share` and `distance`; empty before the first."""

    def update_send(self, loss: float) -> None:
        """Publish the weights in the background, and begin to read another process's. Call it before a batch.

        Args:
            loss: of the batch before; only `interpolation` loss and `divergence_threshold` need it.
        """
        if self._sending is None or self._sending.done():
            weights = weights_of(self._module, self._layout)
            self._sending = self._helper.submit(self._publish, weights, self._units, loss)
        self._exchange.ask(self._units)

    def update_wait(self, loss: float) -> bool:
        """Average the module's weights with those that were read; returns whether there were any. Call it after the
        optimizer's step.

        Args:
            loss: of this batch.
        """
        self._units += 1
        other = self._exchange.answer()
        if other is None:
            return False
        own = weights_of(self._module, self._layout)
        averaged = self._exchange.average(own.parameters, own.buffers, other, self._units, loss)
        load_weights(self._module, self._layout, Weights(*averaged, own.counters))
        self.met = self._exchange.report().met
        return True

    def close(self) -> None:
        """Leave the group: the others no longer read these weights."""
        self._helper.shutdown()
        try:
            self._board.leave()
        except RedisError as error:  # the entry expires
            log.warning("not signed off", name=self.name, error=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, weights: Weights, units: int, loss: float) -> None:
        try:
            message = self._encoder.whole(weights.parameters, weights.buffers, units * len(self._layout.buckets))
            self._board.publish(self._token, units, loss, message)
        except RedisError as error:  # the next may go through
            log.warning("weights not published", name=self.name, error=str(error))

    def _decode(self, published: PublishedNotice, message: Message) -> tuple[Vector, Vector] | None:
        """None: the other trains another model, or publishes in another codec."""
        if published.token != self._token:
            told = "a process of the group has another model or codec: give all of them the same"
            self._remarks.tell(log.warning, told, name=self.name)
            return None
        parameters, buffers = decode_update(self._codec, message, self._layout)
        return parameters, buffers


def connect(
    module: nn.Module, group: str, name: str = "", broker: str = "", codec: str = "float16", **fields: Any
) -> Connection:
    """Join a group of processes that average a module's weights in pairs.

    Args:
        module: trained by your loop; its tensors are float32, or int64 for buffers.
        group: letters, digits, - and _; all processes of a group train the same model.
        name: of this process in the group; default: a random one.
        broker: `redis://...`; default: that of the control plane on this machine.
        codec: for published weights: `float32`, `float16` or `bfloat16`; the same in all processes.
        fields: those of strategy `gossip` that say with whom and how to average, `AVERAGED_BY`.
    Raises: SettingsError: `group`, `codec` or a field cannot be had, or no broker is known; ValidationError: the value
        of a field is wrong; SpecError.
    """
    if others := sorted(fields.keys() - {*AVERAGED_BY}):
        raise SettingsError(f"{', '.join(others)}: a loop of your own takes {', '.join(AVERAGED_BY)}")
    suited = [name for name, one in CODECS.items() if not (one.differences or one.residual)]
    if codec not in suited:
        raise SettingsError(f"codec {codec!r}: choose {', '.join(suited)}; others suit differences alone")
    redis = connect_group(group, broker)
    averaging = parse_strategy({**fields, "kind": "gossip"}).averaging
    assert averaging, "peers of this kind average"
    return Connection(module, redis, group, name or uuid.uuid4().hex[:12], averaging, codec)


def _token(layout: Layout, codec: str) -> str:
    """Names the model's layout and the codec, so that no process averages with another model, or misreads weights."""
    return hashlib.sha256(repr((layout.tensors, codec)).encode()).hexdigest()[:16]
