"""Plain FSDP2 with TIDE: torchrun --nproc-per-node 4 examples/plain_fsdp2.py (on the CPU over gloo, or on GPUs over NCCL)."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_comm import TideConfig, attach


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(dim: int = 128, steps: int = 20) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, dim), *(Block(dim) for _ in range(4)), nn.Linear(dim, 256)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[1:-1]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    report = attach(model, TideConfig(memory_mode="slot_reuse"))  # the one line that TIDE needs
    if dist.get_rank() == 0:
        print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(256, (8, 32), device=device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), (3 * tokens + 1).flatten() % 256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(*report.summary_lines(), sep="\n")
    report.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
