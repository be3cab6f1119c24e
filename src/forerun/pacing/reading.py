"""When a draft model reads a text of which it has read nothing: rent or buy.

A drafter that searches the text before it asks its model can do without the model. Reading the text so far is paid
once. It is due when rounds without the model have lost as much as it costs, or less where the rest of the text promises
much more than that: so a short prompt is soon read for a long answer, and a long prompt never for an answer that ends
before it has paid.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types import Stop

LEAST_OWED = 0.25  # parts of the price, so that the search is tried first
USUAL_ANSWER = 256  # tokens that are expected at most, whatever a request allows
NEEDED = 0.5  # parts of the rounds that are left in which the search will find nothing, as long as nobody knows


@dataclass
class Reading:
    """What is known of one request. All but `is_read` in tokens.

    is_read: whether the model has read the text. num_unread: tokens of the text that it lacks, None = nobody knows yet;
    a text that begins like an earlier one is read as far. gain: what a round of the model gains, less what it costs.
    owed: what rounds without it have lost against it.
    """

    is_read: bool = False
    num_unread: int | None = None
    gain: float = 0.0
    owed: float = 0.0

    def is_due(self, price: float, num_rounds: float) -> bool:
        """Return whether the model is to draft. price: of reading the text so far. num_rounds: that are left."""
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
