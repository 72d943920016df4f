"""What `outrider bench`, `tune` and `overlap` measure and print. They are ordinary clients of the orchestrator."""
