"""A U-Net: each level of the way down is also used on the way up, two or more stages later.

python examples/unet.py
torchrun --standalone --nproc-per-node 2 examples/unet.py
"""

import torch
from torch import nn

import penstock


class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
        )


class UNet(nn.Module):
    """Nothing here knows of stages: skip connections are plain variables of forward."""

    def __init__(self, width=16):
        super().__init__()
        self.enter = Block(3, width)
        self.down1 = Block(width, 2 * width)
        self.down2 = Block(2 * width, 4 * width)
        self.middle = Block(4 * width, 4 * width)
        self.up2 = Block(8 * width, 2 * width)
        self.up1 = Block(4 * width, width)
        self.leave = nn.Conv2d(2 * width, 3, 1)
        self.shrink = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2)

    def forward(self, image):
        first = self.enter(image)
        second = self.down1(self.shrink(first))
        third = self.down2(self.shrink(second))
        hidden = self.middle(third)
        hidden = self.up2(torch.cat([hidden, third], 1))
        hidden = self.up1(torch.cat([self.grow(hidden), second], 1))
        return self.leave(torch.cat([self.grow(hidden), first], 1))


torch.manual_seed(0)
clean = torch.rand(16, 3, 32, 32)
noisy = clean + 0.1 * torch.randn_like(clean)
with penstock.Pipeline(
    UNet(),
    schedule="Interleaved1F1B",
    ranks=2,
    stages=4,
    microbatches=4,
    loss_fn=nn.functional.mse_loss,
) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(10):
        result = pipe.step(noisy, target=clean)
        optimizer.step()
        pipe.zero_grad()
        if pipe.is_main_process:
            print(f"step {step + 1:2}  loss {result.loss:.5f}")
