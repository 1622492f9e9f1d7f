"""Log-probabilities of a rollout's tokens as its trainer computes them: one forward pass of the module."""

import torch


def own_logprobs(model, prompt, tokens):
    """Log-probabilities [num_tokens] of the tokens after the prompt, in eval mode and float32; gradients if enabled."""
    was_training = model.training
    model.eval()
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    model.train(was_training)
    return logits.log_softmax(dim=-1)[range(len(tokens)), tokens]
