"""The commands `outrider bench`, `tune` and `overlap`."""
