//! Shared by the tests: fixtures checked against their manifest, devices, error measures and bars.
#![allow(dead_code)] // each test binary uses a part

pub mod array;
pub mod calls;
pub mod compare;
pub mod definition;
pub mod differences;
pub mod fixture;
pub mod layer;
pub mod operator;
pub mod parameters;
pub mod pieces;
pub mod platform;
pub mod recipe;
pub mod small;
