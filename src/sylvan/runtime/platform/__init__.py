"""Kinds of devices: facts as data, and the little that differs by vendor, behind one interface."""
