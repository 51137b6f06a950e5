"""Tests; in all of them, also small products wait for the weights' half of backward."""

from penstock.backward import search

search.CHEAP = 0
