"""keras: a convolutional network on the backend `jax`, compiled and fitted by Keras itself."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers


def main():
    """Tell bright left halves from bright right halves."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 256)
    x = random.normal(size=(256, 8, 8, 1)).astype("float32")
    x[y == 0, :, :4] += 0.7
    x[y == 1, :, 4:] += 0.7
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(x, y, batch_size=32, epochs=5, verbose=0, validation_split=0.25)
    print("losses", *history.history["loss"])
    print("accuracy", *history.history["val_accuracy"])
    print("logits", model.predict(x[:3], verbose=0))
    text = keras.Sequential([layers.Embedding(11, 8), layers.LSTM(8), layers.Dense(1)])
    text.compile(optimizer="rmsprop", loss="mse")
    words = random.integers(0, 11, (64, 6))
    losses = text.fit(words, words.mean(1), epochs=3, verbose=0).history["loss"]
    print("recurrent", *losses)
    attention = layers.MultiHeadAttention(2, 4)(np.ones((1, 3, 8), "float32"), x[:1, :3, :, 0])
    print("attention", np.asarray(attention).sum())
    assert history.history["val_accuracy"][-1] > 0.8 and losses[-1] < losses[0]


if __name__ == "__main__":
    main()
