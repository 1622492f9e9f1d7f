"""Layers of 8-bit floats in float64: what `models/quantised/scaled.py` computes, and models whose layers are such."""

from torch import nn

from nanovllm.models.quantised.scaled import ScaledLinear, rounded


def scaled_linear(weight, bias=None):
    """A layer with the weight rounded to e4m3, with a scale an output."""
    values, scales = rounded(weight)
    return ScaledLinear(values, scales[:, 0].contiguous(), bias)


class Dense(nn.Module):
    """What a layer computes, in float64; outputs have the input's dtype."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.own = layer.dequantise().double()
        self.bias = layer.bias

    def forward(self, states):
        values, scales = rounded(states)
        output = (values.double() * scales.double()) @ self.own.T
        return (output if self.bias is None else output + self.bias).to(states.dtype)


def replaced(model, make):
    """The model with each layer of 8-bit floats replaced by `make` of it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ScaledLinear):
                parent._modules[name] = make(child)
    return model
