"""When a draft model reads a text of which it has read nothing: rent or buy.

A drafter that searches the text before it asks its model can do without the model. Reading the text so far is paid
once. It is due when rounds without the model have lost its price, or earlier where the rest of the text promises to
gain much more than that: so a short prompt is soon read for a long answer, and a long prompt never for an answer that
ends before it has paid.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types import Stop

LEAST_OWED = 0.25  # share of the price that must be lost first, so that the search is tried
USUAL_ANSWER = 256  # the most tokens that an answer is expected to have, whatever a request allows
NEEDED = 0.5  # assumed share of the remaining rounds in which the search will find nothing


@dataclass
class Reading:
    """Whether the draft model of one request should read its text. Everything but `is_read` is in tokens.

    is_read: whether the model has read the text. num_unread: tokens of the text that it lacks, None = nobody knows yet;
    a prefix shared with an earlier text counts as read. gain: of a round with the model, less its cost. owed: the loss
    so far of rounds without the model.
    """

    is_read: bool = False
    num_unread: int | None = None
    gain: float = 0.0
    owed: float = 0.0

    def is_due(self, price: float, num_rounds: float) -> bool:
        """Return whether the model is to draft. price: of reading the text so far. num_rounds: still expected."""
        if self.is_read or price <= 0:
            return True
        promised = num_rounds * self.gain
        return price <= promised and self.owed >= price * min(1.0, max(LEAST_OWED, price / (NEEDED * promised)))

    def observe(self, stop: Stop, num_drafted: int, num_accepted: int) -> None:
        """Count a round of the request, by the stop of its chain."""
        self.num_unread = self.num_unread if stop.num_unread is None else stop.num_unread
        if not stop.confidences:  # the model was not asked, and may have been right
            gained = num_accepted - sum(stop.search.worth[:num_drafted] if stop.search is not None else ())
            self.owed = max(0.0, self.owed + self.gain - gained)
        if num_drafted:
            self.is_read |= bool(stop.confidences)
