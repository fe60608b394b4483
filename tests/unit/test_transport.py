"""One broadcast of one flat buffer: what the sender puts in is what every worker takes out."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch

from openrlhf_logra.sync.transport import receive, send

SECONDS = 20  # a member that is left waiting fails the test


class Member:
    """One rank of a process group of threads."""

    def __init__(self, rank, queues):
        self.rank, self.queues, self.calls = rank, queues, []

    def broadcast(self, tensor, src, stream=None):
        self.calls.append(tensor.numel())
        if self.rank == src:
            for queue in self.queues:
                queue.put(tensor.clone())
            return
        sent = self.queues[self.rank - 1].get(timeout=SECONDS)
        assert sent.dtype is tensor.dtype and sent.shape == tensor.shape, "the group would hang or write elsewhere"
        tensor.copy_(sent)


def group(receivers):
    """The sender and the receivers."""
    queues = [Queue() for _ in range(receivers)]
    sender, *others = [Member(rank, queues) for rank in range(receivers + 1)]
    return sender, others


def exchange(messages, receivers, delay=None):
    """Send messages one after another; what each receiver got of each."""
    sender, others = group(receivers)

    def take(member):
        if member is others[-1] and delay:
            delay.wait(SECONDS)
        return [receive(member, [len(record) for record in records], "cpu") for records in messages]

    with ThreadPoolExecutor(receivers) as pool:
        taken = [pool.submit(take, member) for member in others]
        for records in messages:
            send(sender, records, "cpu", math.inf)
        if delay:
            delay.set()
        found = [future.result(SECONDS) for future in taken]
    for member in (sender, *others):
        assert member.calls == [sum(map(len, records)) for records in messages]  # one buffer each
    return found


@pytest.mark.parametrize("receivers", [1, 4])
def test_every_worker_gets_the_records_in_order(receivers):
    generator = random.Random(receivers)
    sizes = [[1], [1000], [3, 1, 4, 1, 5], [0, 7, 0], [100_000, 1], [generator.randrange(1, 300) for _ in range(40)]]
    messages = [[generator.randbytes(size) for size in message] for message in sizes]
    assert exchange(messages, receivers) == [messages] * receivers


def test_every_byte_value_survives():
    messages = [[bytes(range(256)), b"\0" * 9, b"\xff" * 9]]
    assert exchange(messages, 2) == [messages] * 2


def test_a_slow_worker_gets_the_same():
    messages = [[bytes([i]) * (i + 1)] for i in range(5)]
    assert exchange(messages, 3, delay=threading.Event()) == [messages] * 3


def test_the_senders_bytes_are_not_shared():
    sender, (member,) = group(1)
    held = []
    sender.broadcast = lambda tensor, src: held.append(tensor)
    records = [b"abc", b"de"]
    send(sender, records, "cpu", math.inf)
    held[0].zero_()
    assert records == [b"abc", b"de"] and held[0].dtype is torch.uint8 and held[0].numel() == 5


def test_a_worker_without_a_channel_says_so():
    with pytest.raises(RuntimeError, match="channel"):
        receive(None, [3], "cpu")
