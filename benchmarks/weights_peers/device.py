"""The device that an arm computes on, and the bytes of it that torch may take."""

from __future__ import annotations

import torch

from weights_peers.job import Job


class Held:
    """Holds a process to the job's bytes of a CUDA device, and tells what it had; on a CPU it does nothing."""

    def __init__(self, job: Job) -> None:
        self._device = torch.device(job.device)
        if self._device.type != "cuda":
            return
        from pagein.weights.planning.device_memory import DeviceMemory

        self._memory = DeviceMemory(self._device)
        total = torch.cuda.mem_get_info(self._device)[1]
        torch.cuda.set_per_process_memory_fraction(min(job.device_memory / total, 1.0), self._device)

    def peak(self) -> int | None:
        """Bytes on the device at the most, context included; None on a CPU."""
        if self._device.type != "cuda":
            return None
        given_back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        return self._memory.mine() + given_back
