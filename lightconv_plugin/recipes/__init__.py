"""From raw data to a row of a table: preparation, training, reproduction, the demonstration."""
