"""What `outrider bench`, `tune` and `overlap` measure and print. A client of the orchestrator like any other."""
