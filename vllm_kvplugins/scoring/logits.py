"""What a layer does to attention logits besides scaling: a cap, and learned sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """Rules of one layer, for scores that must equal the model's attention.

    Attributes:
        sinks: float32 [num_q_heads], a logit per query head that takes part in every
            softmax and has no token (gpt-oss); None: none.
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2); 0: no cap.
    """

    sinks: torch.Tensor | None = None
    softcap: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether scaled logits go to the softmax as they are."""
        return self.sinks is None and not self.softcap

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """Cap scaled logits, in place, before any mask.

        Args:
            logits: float32, any shape.
        """
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def with_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Attention in which sinks take their share, from attention without them.

        Args:
            output: [..., num_q_heads, head_dim].
            lse: float32 [..., num_q_heads], its log-sum-exp.

        Returns:
            ``output`` itself if there are no sinks.
        """
        if self.sinks is None:
            return output
        share = (lse - self.sinks.to(lse.device)).sigmoid_()
        return (output.float() * share.unsqueeze(-1)).to(output.dtype)

    def softmax(self, logits: torch.Tensor, heads: slice | None = None) -> torch.Tensor:
        """Attention weights, in place: the softmax in which sinks take their share.

        ``softmax([l, sink])`` without its last entry is ``softmax(l)`` times
        ``sigmoid(logsumexp(l) - sink)``.

        Args:
            logits: float32 [..., num_q_heads, num_queries, num_slots], capped and
                masked. Leading dimensions may divide the query heads, in their order.
            heads: query heads that the logits are of; None: all.

        Returns:
            float32, same shape; ``logits`` itself.
        """
        share = None
        if self.sinks is not None:
            sinks = self.sinks if heads is None else self.sinks[heads]
            sinks = sinks.to(logits.device).view(*logits.shape[:-2], 1, 1)
            share = (logits.logsumexp(-1, keepdim=True) - sinks).sigmoid_()
        torch.softmax(logits, dim=-1, out=logits)
        return logits if share is None else logits.mul_(share)


PLAIN = LogitRules()
