"""A residual network with batch norm on handwritten digits, in plain torch: one process, whole batches."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, DECAY = 64, 0.95


def digits():
    """1,797 images of 8 by 8 pixels: (training images, labels), (test images, labels)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order[:1500]], labels[order[:1500]]), (images[order[1500:]], labels[order[1500:]])


def batch(images, labels, step):
    chosen = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(step))
    return images[chosen], labels[chosen]


class Block(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, width):
        super().__init__()
        convolution = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.inner = nn.Sequential(
            convolution[0], nn.BatchNorm2d(width), nn.ReLU(), convolution[1], nn.BatchNorm2d(width)
        )

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def resnet(width=16):
    entry = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    leave = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*entry, Block(width), nn.MaxPool2d(2), Block(width), *leave)


def main(steps=60):
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = digits()
    model = resnet()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = batch(images, labels, step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.item())
    with torch.no_grad():
        accuracy = (average.eval()(test_images).argmax(1) == test_labels).float().mean()
    print(f"loss {losses[-1]:.4f}, accuracy of the averaged weights {accuracy.item():.1%}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
