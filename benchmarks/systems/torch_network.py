"""The network of `task` in PyTorch, for torch elastic and Ray Train."""

from typing import Any

import torch
from torch import nn

from systems import task


class Network(nn.Module):
    """The network; its output for a step is the loss to be minimized."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in task.start().items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
        logits = torch.tanh(x @ self.a + self.b) @ self.c + self.d
        counted = sum(getattr(self, name)[number - 1] for name in task.COUNTS)
        return nn.functional.cross_entropy(logits, y) - counted

    def optimizer(self) -> torch.optim.Optimizer:
        """Returns SGD with momentum, which adds 1 to a count for each step."""
        counts = [getattr(self, name) for name in task.COUNTS]
        dense = [self.a, self.b, self.c, self.d]
        groups = [{"params": dense, "momentum": task.MOMENTUM}, {"params": counts, "lr": 1.0}]
        return torch.optim.SGD(groups, lr=task.RATE)

    def state(self, number: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns a checkpoint after a step."""
        return {"step": number, "network": self.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
        """Takes a checkpoint; returns its step."""
        self.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done: int = state["step"]
        return done

    def finish(self) -> None:
        """Writes the job's final state."""
        task.finish({name: each.detach().numpy() for name, each in self.named_parameters()})
