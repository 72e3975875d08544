"""Forecast tomorrow's highest temperature in Seattle from the last weeks: `python examples/rnn/weather.py`.

The forecast is today's temperature plus a learned change, so an untrained model is the persistence forecast, which is
hard to beat by much. Ignored on purpose: uncertainty, and forecasts of more than a day.
"""

from __future__ import annotations

import argparse

import numpy as np

import hetu as ht
from hetu import nn

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
    scaled = (features - past.mean(axis=0)) / past.std(axis=0)
    return scaled.astype("float32"), measured[:, data.info["columns"].index("temp_max")], len(test)


def windows(features: np.ndarray, temperature: np.ndarray, length: int) -> ht.data.ArrayDataset:
    """Rows of `length` days (n, length, features), the last day's temperature (n,) and the next day's (n,)."""
    x = ht.data.sliding_windows(features[:-1], length)
    return ht.data.ArrayDataset(x, temperature[length - 1 : -1], temperature[length:], names=("x", "today", "tomorrow"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Forecast the temperature of the next day with an LSTM.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=14, help="days that a forecast looks back")
    parser.add_argument("--units", type=int, default=32, help="of the LSTM")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of Adam; falls to 0 along a cosine")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and dropout")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N windows only")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    features, temperature, test_days = days()
    rows = windows(features, temperature, args.length)
    train, test = (ht.data.ArrayDataset(*part) for part in (rows[:-test_days][: args.limit], rows[-test_days:]))
    batches = ht.data.DataLoader(train, args.batch_size, shuffle=True, seed=args.seed)

    x = ht.placeholder("x", (None, args.length, features.shape[1]))
    today = ht.placeholder("today", (None,))
    tomorrow = ht.placeholder("tomorrow", (None,))
    _, (h, _) = nn.LSTM(features.shape[1], args.units)(x)
    change = nn.Linear(args.units, 1, weight_init=ht.init.zeros)(nn.Dropout(0.5)(h))
    forecast = today + ht.squeeze(change, axis=1)
    loss = ht.mean(ht.mae_loss(forecast, tomorrow))
    rate = ht.schedules.cosine(args.learning_rate, steps=args.epochs * len(batches))
    updates = ht.optim.AdamW(rate, weight_decay=0.1, clip_norm=1.0).minimize(loss)

    executor = ht.Executor({"train": [loss, updates], "eval": [loss]}, seed=args.seed)
    inputs, validate = (x, today, tomorrow), ("eval", ht.data.DataLoader(test, test_days))
    history = ht.fit(executor, batches, epochs=args.epochs, inputs=inputs, validate=validate)
    print(history)
    persistence = np.abs(test.arrays[1] - test.arrays[2]).mean()
    error = history["val_loss"][-1]
    print(f"lstm on seattle weather: mean error {error:.3f} C in {test_days} days (persistence {persistence:.3f} C)")


if __name__ == "__main__":
    main()
