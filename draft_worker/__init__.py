"""The process of the draft model: serves requests with a drafter that works ahead."""
