"""The sync's messages to OpenRLHF's rollout actors, over Ray."""

import time

import ray
import torch

from ..sync.transport import Channel, send

ANSWER_SECONDS = 600  # how long the trainer waits for an engine, and for one to be started again


class RayEngines:
    """Our `SyncClient` over OpenRLHF's rollout actors.

    The payload goes to Ray's object store once; with a `channel` (a process group with all workers of all engines) it
    is broadcast there once instead, as one flat buffer.
    """

    def __init__(self, engines: list, channel: Channel | None = None, seconds: float = ANSWER_SECONDS):
        self._engines, self._channel, self._seconds = engines, channel, seconds

    def count(self) -> int:
        return len(self._engines)

    def initialise(self, engines: list[int], init_info: dict) -> list:
        deadline = time.monotonic() + self._seconds
        answers = self._call(engines, "logra_initialise", init_info, deadline)
        # An actor that Ray is starting again refuses calls until it is there.
        starting = ray.exceptions.ActorUnavailableError
        while any(isinstance(answer, starting) for answer in answers) and time.monotonic() < deadline:
            time.sleep(1)
            answers = self._call(engines, "logra_initialise", init_info, deadline)
        return answers

    def sync(self, engines: list[int], update_info: dict) -> list:
        deadline = time.monotonic() + self._seconds
        records = update_info.get("records")
        # A broadcast needs everyone: the repair of some engines goes through the object store.
        if not records or len(engines) < len(self._engines) or not self._all_join(engines, deadline):
            return self._call(engines, "logra_sync", update_info, deadline)
        info = {**update_info, "records": [], "sizes": [len(record) for record in records]}
        references = self._submit(engines, "logra_sync", info)
        sent = send(self._channel, records, torch.cuda.current_device(), deadline)
        answers = [_result(reference, deadline) for reference in references]
        if not sent or any(isinstance(answer, Exception) for answer in answers):
            self._leave_the_channel()
        return answers

    def _all_join(self, engines: list[int], deadline: float) -> bool:
        """Whether there is a channel that every engine will take part in: one that is gone would be waited for."""
        if self._channel is None:
            return False
        answers = self._call(engines, "logra_sync", {}, deadline)
        if any(isinstance(answer, Exception) for answer in answers):
            self._leave_the_channel()
        return self._channel is not None

    def _leave_the_channel(self) -> None:
        # An engine that was started again is in no group.
        print("[logra] an engine failed: from here on records travel by Ray's object store", flush=True)
        self._channel = None

    def _call(self, engines: list[int], method: str, argument: dict, deadline: float) -> list:
        return [_result(reference, deadline) for reference in self._submit(engines, method, argument)]

    def _submit(self, engines: list[int], method: str, argument: dict) -> list:
        shared = ray.put(argument)
        return [getattr(self._engines[i], method).remote(shared) for i in engines]


def _result(reference, deadline: float):
    try:
        return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.RayError as error:  # a dead actor, an exception in it, no answer in time
        return error
