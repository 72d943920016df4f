"""The worker processes as the orchestrator knows them: who has a place, who is let in, who lives; knows no request."""
