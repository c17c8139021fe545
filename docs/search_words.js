// The search reads each word of a question as the beginning of a word: "a" would find every word with a. So small words are left out.
const SMALL_WORDS = new Set(("a an and any are as at be by can do does for from have how i if in is it its me more my not of on or our should so that the their " +
  "there this to use we what when where who why will with you your").split(" "));

function leaveOutSmallWords(question) {
  const words = question.split(/\s+/).filter(word => word && !SMALL_WORDS.has(word.toLowerCase().replace(/[?.!]+$/, "")))
    .map(word => word.toLowerCase() === "own" ? "custom" : word);  // the theme's search leaves "own" out
  return words.length ? words.join(" ").replace(/[?.!]+$/, "") : question;
}

const postMessageOfWorker = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuestion = message && message.type === 2 && typeof message.data === "string";  // 2: what Material's search worker is asked
  return postMessageOfWorker.call(this, isQuestion ? { ...message, data: leaveOutSmallWords(message.data) } : message, ...rest);
};
