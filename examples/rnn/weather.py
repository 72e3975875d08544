"""Forecast tomorrow's highest temperature in Seattle from the last weeks: `python examples/rnn/weather.py`.

The forecast is today's temperature plus a learned change, so an untrained model is the persistence forecast, which is
hard to beat by much. Ignored on purpose: uncertainty, and forecasts of more than a day.
"""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu import nn
from hetu.script import Script, positive

DAYS_OF_YEAR = 365.25


def days() -> tuple[np.ndarray, np.ndarray, int]:
    """Features (days, 11) scaled by the training part, the highest temperature (days,), and the number of test days."""
    data, test = ht.data.seattle_weather("all"), ht.data.seattle_weather("test")
    measured, kind = data.arrays
    kinds = np.eye(len(data.info["weather"]))[kind]
    angle = 2 * np.pi * np.arange(len(data)) / DAYS_OF_YEAR
    season = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    features = np.concatenate([np.log1p(measured[:, :1]), measured[:, 1:], kinds, season], axis=1)
    past = features[: -len(test)]
    return ht.data.standardized(features, past), measured[:, data.info["columns"].index("temp_max")], len(test)


def windows(features: np.ndarray, temperature: np.ndarray, length: int) -> ht.data.ArrayDataset:
    """Rows of `length` days (n, length, features), the last day's temperature (n,) and the next day's (n,)."""
    x = ht.data.sliding_windows(features[:-1], length)
    return ht.data.ArrayDataset(x, temperature[length - 1 : -1], temperature[length:], names=("x", "today", "tomorrow"))


def main() -> None:
    script = Script(__doc__, epochs=20, batch_size=32, learning_rate=3e-3)
    script.add("--length", type=positive, default=14, metavar="N", help="days that a forecast looks back (%(default)s)")
    script.add("--units", type=positive, default=32, metavar="N", help="of the LSTM (%(default)s)")
    options = script.parse()
    features, temperature, test_days = days()
    rows = windows(features, temperature, options.length)
    train, test = (ht.data.ArrayDataset(*part) for part in (rows[:-test_days], rows[-test_days:]))
    batches = script.batches(script.first(train))

    x = ht.placeholder("x", (None, options.length, features.shape[1]))
    today = ht.placeholder("today", (None,))
    tomorrow = ht.placeholder("tomorrow", (None,))
    _, (h, _) = nn.LSTM(features.shape[1], options.units)(x)
    change = nn.Linear(options.units, 1, weight_init=ht.init.zeros)(nn.Dropout(0.5)(h))
    forecast = today + ht.squeeze(change, axis=1)
    loss = ht.mean(ht.mae_loss(forecast, tomorrow))
    updates = ht.optim.AdamW(script.rate(batches), weight_decay=0.1, clip_norm=1.0).minimize(loss)

    executor = script.executor({"train": [loss, updates], "eval": [loss]})
    validate = "eval", ht.data.DataLoader(test, test_days)
    history = script.fit(executor, batches, inputs=(x, today, tomorrow), validate=validate)
    persistence = np.abs(test.arrays[1] - test.arrays[2]).mean()
    error = history["val_loss"][-1]
    found = f"mean error {error:.3f} C in {test_days} days (persistence {persistence:.3f} C)"
    script.say(f"lstm on seattle weather: {found}")


if __name__ == "__main__":
    main()
