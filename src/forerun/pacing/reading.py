"""When a draft model reads a text of which it has read nothing: rent or buy.

A drafter that searches the text before it asks its model can do without the model. Reading the text so far is paid
once. It is due when rounds without the model have lost as much as it costs, so that no more than twice is paid of what
would have been best; and never for a text that ends before it has paid.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types import Stop


@dataclass
class Reading:
    """What is known of one request. All but `is_read` in tokens.

    is_read: whether the model has read the text. gain: what a round of the model gains, less what it costs. owed: what
    rounds without it would have gained.
    """

    is_read: bool = False
    gain: float = 0.0
    owed: float = 0.0

    def is_due(self, price: float, num_rounds: float) -> bool:
        """Return whether the model is to draft. price: of reading the text so far. num_rounds: that are left."""
        return (0.0 if self.is_read else price) <= min(self.owed, num_rounds * self.gain)

    def observe(self, stop: Stop, num_drafted: int) -> None:
        """Count a round of the request, by the stop of its chain."""
        if stop.is_shut and stop.search is not None:
            self.owed += max(0.0, self.gain - stop.search.gain)
        if num_drafted:
            self.is_read |= bool(stop.confidences)
