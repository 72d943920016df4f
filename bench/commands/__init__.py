"""The commands `outrider bench`, `tune`, `overlap` and `convert`."""
