"""What only lessons use: models and data, predictions, explorers, schedules, programs in a terminal."""
