"""How long a chip takes for a compiled schedule: its work and its waiting.

The schedule is a list of events in the order of the program. A transfer that
one instruction starts and another ends proceeds while the chip works on those
between them. A TPU can also fuse a collective with several other instructions;
then it proceeds during those only. For any other transfer the chip waits.
Transfers that need the same links proceed one after the other.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from tepo_jax.tools.plan import chips


@dataclasses.dataclass(frozen=True)
class Work:
  """An instruction. carries: names of fused transfers that proceed in it."""
  flops: float
  hbm_bytes: float
  carries: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Send:
  """A transfer starts.

  kind: of the collective. size: bytes that a chip sends. name: of the transfer,
  for `Wait`; '' if the chip waits at once. fused: it proceeds only during the
  `Work` that carries it. direction: 1 or −1 if it goes around a ring one way
  only, else 0. groups: places in the mesh of the chips that take part together.
  """
  kind: str
  size: float
  name: str = ''
  fused: bool = False
  direction: int = 0
  groups: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Wait:
  """The chip waits for the end of a transfer."""
  name: str


@dataclasses.dataclass(frozen=True)
class Loop:
  """Events that repeat."""
  times: float
  events: tuple['Event', ...]


Event = Work | Send | Wait | Loop


@dataclasses.dataclass(eq=False)
class _Transfer:
  """lanes: the directions whose links it needs. left: seconds of it."""
  send: Send
  lanes: tuple[int, ...]
  left: float


def seconds(events: Iterable[Event], slice_: chips.Slice
            ) -> tuple[float, float]:
  """Returns seconds of work and seconds of waiting on a chip of a slice.

  Work takes the larger of its times for arithmetic and for memory. A collective
  takes the chip's latency, and its bytes at the bandwidth of its slowest group.
  """
  chip = slice_.chip
  work = waiting = 0.0
  pending = []
  for event in events:
    match event:
      case Work():
        busy = max(event.flops / chip.flops,
                   event.hbm_bytes / chip.hbm_bandwidth)
        work += busy
        _proceed(pending, busy, event.carries)
      case Loop():
        once, waits = (event.times * t for t in seconds(event.events, slice_))
        work, waiting = work + once, waiting + waits
        _proceed(pending, once)
      case Send():
        pending.append(_transfer(event, slice_))
        if not event.name:
          waiting += _finish(pending, event.name)
      case Wait():
        waiting += _finish(pending, event.name)
  while pending:  # what ends in a loop's next iteration is not hidden by it
    waiting += _finish(pending, pending[0].send.name)
  return work, waiting


def _transfer(send, slice_):
  one_way = send.direction and slice_.chip.directions == 2
  bandwidth = min(map(slice_.bandwidth, send.groups),
                  default=slice_.chip.link_bandwidth / (2 if one_way else 1))
  return _Transfer(
      send, (send.direction,) if one_way else (1, -1),
      slice_.chip.latency + send.size / bandwidth)


def _proceed(transfers: Iterable[_Transfer], time: float,
             carries: Sequence[str] = (), lanes: Sequence[int] = (1, -1)):
  """Lets transfers proceed for `time` on `lanes`, the oldest first."""
  free = {1: 0.0, -1: 0.0} | dict.fromkeys(lanes, time)
  for transfer in transfers:
    if not transfer.send.fused or transfer.send.name in carries:
      done = min(transfer.left, *(free[lane] for lane in transfer.lanes))
      transfer.left -= done
      for lane in transfer.lanes:
        free[lane] -= done


def _finish(pending, name):
  """Returns how long the chip waits for the transfers of a name, 0 if there are
  none; the others proceed on links that these leave free."""
  waits = 0.0
  for transfer in [t for t in pending if t.send.name == name]:
    pending.remove(transfer)
    _proceed(pending, transfer.left,
             lanes=[lane for lane in (1, -1) if lane not in transfer.lanes])
    waits += transfer.left
  return waits
