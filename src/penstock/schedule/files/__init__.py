"""Schedules in files: CSV, which torch shares, and JSON, which holds all."""

from penstock.schedule.files.csv_form import csv_table, from_csv, to_csv
from penstock.schedule.files.disk import load, save
from penstock.schedule.files.json_form import from_json, to_json
from penstock.schedule.files.limits import Limits

__all__ = ["Limits", "csv_table", "from_csv", "from_json", "load", "save", "to_csv", "to_json"]
