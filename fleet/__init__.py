"""Many engines behind one gate (docs/fleet.md): the only room that knows Ray, which is an extra, `outrider[fleet]`."""
