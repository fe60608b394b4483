"""How the bytes of a sync travel where trainer and engines share a process group: one broadcast of one flat buffer.

Without a group they travel with the call itself (Ray's object store). The group is anything with
`broadcast(tensor, src)`: vLLM's PyNcclCommunicator on GPUs, a stand-in in tests.
"""

from typing import Protocol

import torch


class Channel(Protocol):
    """A process group of the sender (rank 0) and every worker of every engine."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> object: ...


def send(channel: Channel, records: list[bytes], device: torch.device | str) -> None:
    """Broadcast the records to all workers, each of which is in `receive` or will be. Called by the sender."""
    buffer = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).to(device)
    channel.broadcast(buffer, src=0)


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
    channel.broadcast(buffer, src=0)
    return [part.cpu().numpy().tobytes() for part in buffer.split(sizes)]
