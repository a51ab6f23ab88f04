"""Collectives between ranks, by process group or shared memory, and what ranks do when one of them fails."""
