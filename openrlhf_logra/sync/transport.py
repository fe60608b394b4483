"""How the bytes of a sync travel where trainer and engines share a process group: one broadcast of one flat buffer.

Without a group they travel with the call itself (Ray's object store). The group is anything with
`broadcast(tensor, src, stream)`: vLLM's PyNcclCommunicator on GPUs, a stand-in in tests.
"""

import time
from typing import Any, Protocol

import torch


class Channel(Protocol):
    """A process group of the sender (rank 0) and every worker of every engine."""

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> object: ...


def send(channel: Channel, records: list[bytes], device: torch.device | str, deadline: float) -> bool:
    """Broadcast the records to all workers, each of which is in `receive` or will be. Called by the sender.

    Args:
        deadline: value of time.monotonic() after which a broadcast that somebody has not joined is given up.

    Returns:
        Whether it ended in time.
    """
    buffer = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).to(device)
    if not buffer.is_cuda:
        channel.broadcast(buffer, src=0)
        return True
    # On a stream of its own: a broadcast that hangs must not hold up the trainer's collectives, which say so.
    stream = torch.cuda.Stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    channel.broadcast(buffer, src=0, stream=stream)
    buffer.record_stream(stream)
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def receive(channel: Channel | None, sizes: list[int], device: torch.device | str) -> list[bytes]:
    """The records of one `send`, in order.

    Args:
        sizes: their lengths in bytes.

    Raises:
        RuntimeError: this worker has no channel.
    """
    if channel is None:
        raise RuntimeError("the records come by a channel that this worker was not given")
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
    channel.broadcast(buffer, src=0, stream=stream)
    return [part.cpu().numpy().tobytes() for part in buffer.split(sizes)]
