"""Defines `MessageAudit`, what was learnt of a client from a single round."""

from dataclasses import dataclass
from typing import final

from polyfed.core.errors import UserError


@final
@dataclass(frozen=True)
class MessageAudit:
    """Holds what a server that keeps what it receives reconstructed of a client from a single message.

    Attributes:
        client: its id.
        round: of the message: 1, or 2 if the server knows no weights before round 1.
        senders: number of clients in what the server sees: 1, or those of a secure sum.
        images: number of training examples of the client; 0 if these are not images.
        steps: number of local steps that the message comes from, about; of differentially private training on average.
        candidates: number of reconstructions that were compared with the images.
        best_psnr: of the image that was reconstructed best, in dB; None without candidates.
        mean_psnr: mean over the client's images of the PSNR of the reconstruction closest to each.
        other_best_psnr, other_mean_psnr: the same reconstructions compared with as many images that the client did not
            train on, or fewer if there are not as many: what an attack reaches that learnt nothing of single images.
        label_source: what the label counts were inferred from; empty if from nothing.
        labels_right: share of the client's examples whose labels are counted rightly; None without a source.
        labels_right_by_guess: the same for the guess that all classes are equally frequent.
        note: why images were not attacked; empty if they were.
    """

    client: str
    round: int
    senders: int
    images: int
    steps: int
    candidates: int
    best_psnr: float | None
    mean_psnr: float | None
    other_best_psnr: float | None
    other_mean_psnr: float | None
    label_source: str
    labels_right: float | None
    labels_right_by_guess: float
    note: str = ""

    def __post_init__(self) -> None:
        if (self.best_psnr is None) != (self.candidates == 0):
            raise UserError(
                f"an audit of messages has a PSNR if there were candidates, got best_psnr={self.best_psnr!r} and "
                f"candidates={self.candidates!r}"
            )

    def describe_images(self) -> str:
        """Returns the four PSNRs as a text of a table, or why there are none."""
        if self.best_psnr is None or self.mean_psnr is None:
            return self.note or "not attacked"
        text = f"{self.best_psnr:.1f} (mean {self.mean_psnr:.1f})"
        if self.other_best_psnr is None or self.other_mean_psnr is None:
            return text
        return f"{text}, others {self.other_best_psnr:.1f} (mean {self.other_mean_psnr:.1f})"

    def describe_labels(self) -> str:
        """Returns how well the labels were counted, as a text of a table."""
        guess = f"guess {100 * self.labels_right_by_guess:.0f} %"
        if self.labels_right is None:
            return f"not inferred, {guess}"
        return f"{100 * self.labels_right:.0f} % right ({self.label_source}), {guess}"
