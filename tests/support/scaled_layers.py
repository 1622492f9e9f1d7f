"""Layers of 8-bit floats in float64: what `models/quantised/scaled.py` computes, and models whose layers are such."""

from torch import nn

from nanovllm.models.quantised.scaled import BLOCK, E4M3, LARGEST, ScaledLinear, rounded


def scaled_linear(weight, bias=None, *, in_blocks=False):
    """A layer with the weight rounded to e4m3, with a scale an output or a block."""
    if not in_blocks:
        values, scales = rounded(weight)
        return ScaledLinear(values, scales[:, 0].contiguous(), bias)
    blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return ScaledLinear(values.flatten(2, 3).flatten(0, 1).contiguous(), scales, bias)


class Dense(nn.Module):
    """What a layer computes, in float64; outputs have the input's dtype."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.own = layer.dequantise().double()
        self.bias = layer.bias
        self.run = BLOCK if layer.scales.dim() == 2 else layer.in_features

    def forward(self, states):
        values, scales = rounded(states.unflatten(-1, (-1, self.run)))
        output = (values.double() * scales.double()).flatten(-2) @ self.own.T
        return (output if self.bias is None else output + self.bias).to(states.dtype)


def replaced(model, make):
    """The model with each layer of 8-bit floats replaced by `make` of it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ScaledLinear):
                parent._modules[name] = make(child)
    return model
